// Attention of the tokens of a prefill chunk: a page of queries at a time over all pages before it, then over its own
// tokens. Pages are unpacked to fp32, since many queries meet them.
#pragma once
#include "linear.h"
#include "pages.h"

namespace {

inline size_t in_blocks(size_t count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

// fp32 memory of a thread. `queries`, `sums` [P group, channels], `weights` [P group, tokens], of which `largest` and
// `totals` [P group]; `keys` [D, tokens], `values` [P, channels]. Numbers behind P and D may be anything but NaN.
struct TileScratch {
  float *queries, *sums, *weights, *largest, *totals, *keys, *values;
  Scratch unpacking;
  size_t channels, tokens;

  // Places all of it from `memory` on, and says where it ends.
  float* place(const Layer& layer, float* memory) {
    const size_t rows = (size_t)layer.page_tokens * layer.group;
    channels = in_blocks(layer.head_dim), tokens = in_blocks(layer.page_tokens);
    float* end = memory;
    const auto take = [&](size_t size) { return (end += padded(size)) - padded(size); };
    queries = take(rows * channels), sums = take(rows * channels), weights = take(rows * tokens);
    largest = take(rows), totals = take(rows);
    keys = take(layer.head_dim * tokens), values = take(layer.page_tokens * channels);
    return unpacking.place(layer, end);
  }
};

// c [num_rows, width] = a [num_rows, depth] . b [depth, width], added to what is there if ADDS; `a_stride`, … numbers
// from row to row. As wide as rows of `c`, which are whole blocks.
template <bool ADDS>
inline void multiply_tile(int num_rows, const float* a, size_t a_stride, const float* b, size_t b_stride, size_t depth,
                          float* c, size_t c_stride) {
  for (size_t first = 0; first < c_stride; first += BLOCK)
    for (int row = 0; row < num_rows; row += MOST_ROWS)
      with_count(num_rows - row < MOST_ROWS ? num_rows - row : MOST_ROWS, [&](auto count) {
        constexpr int M = decltype(count)::value;
        float* out = c + row * c_stride + first;
        Floats sums[M][WIDTH] = {};
        for (int m = 0; ADDS && m < M; ++m)
          for (int v = 0; v < WIDTH; ++v) sums[m][v] = load(out + m * c_stride + v * LANES);
        sum_block<Fp32Code, false>(sums, a + row * a_stride, a_stride, (const uint8_t*)(b + first), 4 * b_stride, depth);
        for (int m = 0; m < M; ++m)
          for (int v = 0; v < WIDTH; ++v) store(out + m * c_stride + v * LANES, sums[m][v]);
      });
}

inline void transpose(const float* from, size_t from_stride, size_t num_rows, size_t num_columns, float* to,
                      size_t to_stride) {
  for (size_t first = 0; first < num_rows; first += 8)
    for (size_t column = 0; column < num_columns; ++column)
      for (size_t row = first; row < first + 8 && row < num_rows; ++row)
        to[column * to_stride + row] = from[row * from_stride + column];
}

// All tokens of a page: its K to `keys`, its V to `values`.
inline void read_page(const Layer& layer, const Page& page, int head, const TileScratch& s) {
  const size_t tokens = layer.page_tokens, channels = layer.head_dim;
  float* tile = s.unpacking.tile;
  if (!page.is_sealed) {
    const size_t row_bytes = bytes_of(layer.slot_code, channels);
    const uint8_t *keys = slot_half(layer, page, head, true).bytes, *values = slot_half(layer, page, head, false).bytes;
    with_code(layer.slot_code, [&](auto code) {
      for (size_t n = 0; n < tokens; ++n) {
        unpack_row<decltype(code)>(keys + n * row_bytes, channels, tile + n * channels);
        unpack_row<decltype(code)>(values + n * row_bytes, channels, s.values + n * s.channels);
      }
    });
    return transpose(tile, channels, tokens, channels, s.keys, s.tokens);
  }
  unpack_keys(layer, page.bytes, head, tile, s.unpacking);
  transpose(tile, channels, tokens, channels, s.keys, s.tokens);
  unpack_tile(layer, layer.v, page.bytes, head, tile, s.unpacking);
  if (!is_raw(layer.v)) return transpose(tile, tokens, channels, tokens, s.values, s.channels);
  for (size_t n = 0; n < tokens; ++n) __builtin_memcpy(s.values + n * s.channels, tile + n * channels, 4 * channels);
}

// What queries see of `num_tokens` keys: all of them, or, if they are the queries' own tokens, those up to their own.
inline void add_page(const Layer& layer, const TileScratch& s, int num_rows, int num_tokens, bool is_own) {
  multiply_tile<false>(num_rows, s.queries, s.channels, s.keys, s.tokens, layer.head_dim, s.weights, s.tokens);
  for (int row = 0; row < num_rows; ++row) {
    float *logits = s.weights + row * s.tokens, *sums = s.sums + row * s.channels;
    const int seen = is_own ? row / layer.group + 1 : num_tokens;
    for (int n = seen; n < (seen + LANES - 1) / LANES * LANES; ++n) logits[n] = -__builtin_inff();
    Floats most = load(logits);
    for (int n = LANES; n < seen; n += LANES) most = larger(load(logits + n), most);
    const float largest = largest_of(most), before = s.largest[row];
    if (largest > before) {
      const float factor = exp2_of(before - largest);
      s.largest[row] = largest, s.totals[row] *= factor;
      for (size_t c = 0; c < s.channels; c += LANES) store(sums + c, load(sums + c) * factor);
    }
    Floats total = splat(0.0f);
    for (int n = 0; n < seen; n += LANES) {
      const Floats logit = load(logits + n);
      const Floats weight = logit == -__builtin_inff() ? splat(0.0f) : exp2_of(logit - s.largest[row]);
      total += weight;
      store(logits + n, weight);
    }
    s.totals[row] += sum_of(total);
    for (int n = (seen + LANES - 1) / LANES * LANES; n < num_tokens; ++n) logits[n] = 0.0f;
  }
  multiply_tile<true>(num_rows, s.weights, s.tokens, s.values, s.channels, num_tokens, s.sums, s.channels);
}

// One page of queries and one KV head.
inline void attend_tile(const Layer& layer, const Chunk& chunk, int tile, int head, const TileScratch& s) {
  const int first = tile * layer.page_tokens, left = chunk.num_rows - first;
  const int num_tokens = left < layer.page_tokens ? left : layer.page_tokens, num_rows = num_tokens * layer.group;
  const size_t channels = layer.head_dim, kv_stride = layer.num_kv_heads * channels, q_stride = layer.group * kv_stride;
  const size_t own = first * kv_stride + head * channels, heads = layer.group * channels;
  const float scale = 1.44269504088896341f / __builtin_sqrtf(channels);
  for (int row = 0; row < num_rows; ++row) {
    const float* q = chunk.q + (first + row / layer.group) * q_stride + head * heads + row % layer.group * channels;
    for (size_t c = 0; c < channels; ++c) s.queries[row * s.channels + c] = q[c] * scale;
    for (size_t c = 0; c < s.channels; ++c) s.sums[row * s.channels + c] = 0.0f;
    s.largest[row] = -__builtin_inff(), s.totals[row] = 0.0f;
  }
  for (int n = 0; n < chunk.num_context + tile; ++n) {
    read_page(layer, page_at(layer, chunk.entries[n], layer.page_tokens), head, s);
    add_page(layer, s, num_rows, layer.page_tokens, false);
  }
  transpose(chunk.k + own, kv_stride, num_tokens, channels, s.keys, s.tokens);
  for (int n = 0; n < num_tokens; ++n)
    __builtin_memcpy(s.values + n * s.channels, chunk.v + own + n * kv_stride, 4 * channels);
  add_page(layer, s, num_rows, num_tokens, true);
  for (int row = 0; row < num_rows; ++row) {
    float* out = chunk.out + (first + row / layer.group) * q_stride + head * heads + row % layer.group * channels;
    for (size_t c = 0; c < channels; ++c) out[c] = s.sums[row * s.channels + c] / s.totals[row];
  }
}

inline void attend_chunk(Worker& worker, const Layer& layer, const Chunk& chunk) {
  TileScratch scratch;
  scratch.place(layer, (float*)(chunk.scratch + worker.thread * chunk.scratch_bytes));
  const int num_tiles = (chunk.num_rows + layer.page_tokens - 1) / layer.page_tokens;
  worker.share(num_tiles * layer.num_kv_heads, 1, [&](int n) {  // the longest first
    attend_tile(layer, chunk, num_tiles - 1 - n / layer.num_kv_heads, n % layer.num_kv_heads, scratch);
  });
}

}  // namespace
