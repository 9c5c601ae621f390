// Logits and weighted values of one page and KV head for G queries.
#pragma once
#include "parameters.h"

namespace {

constexpr int MOST_PAGES = 16;  // of a split (SPLIT_PAGES in tables.py)

// fp32 memory of a thread. Queries, weights and what they are folded into are [MOST_QUERIES]: `channels`, `tokens` (of
// a split) and `longest` apart.
struct Scratch {
  float *queries, *sums, *products, *weights, *folded, *tile, *scales, *zeros;
  size_t channels, tokens, longest;

  // Places all of it from `memory` on, and says where it ends.
  float* place(const Layer& layer, float* memory) {
    const size_t page = padded(layer.page_tokens), tile_size = padded((size_t)layer.page_tokens * layer.head_dim);
    channels = padded(layer.head_dim), tokens = padded((size_t)layer.page_tokens * MOST_PAGES);
    longest = channels > page ? channels : page;
    float* end = memory;
    const auto take = [&](size_t size) { return (end += size) - size; };
    queries = take(MOST_QUERIES * channels), sums = take(MOST_QUERIES * channels);
    products = take(MOST_QUERIES * channels);
    weights = take(MOST_QUERIES * tokens);
    folded = take(MOST_PAGES * MOST_QUERIES * longest);
    tile = take(tile_size), scales = take(tile_size), zeros = take(tile_size);
    return end;
  }
};

inline bool is_raw(const Store& s) { return s.code <= FP16; }

// The shape of codes as they are stored: K has a row for each token, V one for each channel.
struct Shape {
  size_t rows, length;
};

inline Shape shape_of(const Layer& layer, const Store& s) {
  const size_t tokens = layer.page_tokens, channels = layer.head_dim;
  return &s == &layer.v && !is_raw(s) ? Shape{channels, tokens} : Shape{tokens, channels};
}

inline const uint8_t* codes_of(const Store& s, const uint8_t* record, int head, Shape shape) {
  return record + s.codes + head * shape.rows * bytes_of(s.code, shape.length);
}

// The numbers of K or V of a head as fp32 `tile` [rows, length] of the stored shape.
__attribute__((noinline)) void unpack_tile(const Layer& layer, const Store& s, const uint8_t* record, int head,
                                           float* tile, const Scratch& scratch) {
  const Shape shape = shape_of(layer, s);
  const size_t row_bytes = bytes_of(s.code, shape.length), count = shape.rows * shape.length;
  const uint8_t* codes = codes_of(s, record, head, shape);
  with_code(s.code, [&](auto code) {
    for (size_t row = 0; row < shape.rows; ++row)
      unpack_row<decltype(code)>(codes + row * row_bytes, shape.length, tile + row * shape.length);
  });
  for (size_t n = 0; s.num_values && n < count; ++n) tile[n] = s.values[(int)tile[n]];
  if (is_raw(s)) return;
  const size_t group_rows = &s == &layer.k ? s.group_tokens : s.group_channels;
  const size_t group_length = &s == &layer.k ? s.group_channels : s.group_tokens;
  const size_t num_columns = layer.head_dim / s.group_channels;
  const size_t row_step = &s == &layer.k ? num_columns : 1, step = &s == &layer.k ? 1 : num_columns;
  const size_t num_blocks = (shape.rows / group_rows) * (shape.length / group_length);
  read_parameters(Head(s, record, head, num_blocks), num_blocks, scratch.scales, scratch.zeros);
  for (size_t row = 0; row < shape.rows; ++row)
    for (size_t group = 0; group < shape.length / group_length; ++group) {
      const size_t block = row / group_rows * row_step + group * step;
      float* numbers = tile + row * shape.length + group * group_length;
      for (size_t n = 0; n < group_length; ++n)
        numbers[n] = numbers[n] * scratch.scales[block] + scratch.zeros[block];
    }
}

// The same of K, with its tokens' norms, if there are any.
inline void unpack_keys(const Layer& layer, const uint8_t* record, int head, float* tile, const Scratch& scratch) {
  unpack_tile(layer, layer.k, record, head, tile, scratch);
  const size_t channels = layer.head_dim;
  for (int n = 0; layer.norm >= 0 && n < layer.page_tokens; ++n) {
    const float norm = half_at(record + layer.norm + 2 * n);
    for (size_t c = 0; c < channels; ++c) tile[n * channels + c] *= norm;
  }
}

template <int G>
__attribute__((noinline)) void multiply(int32_t code, const Product& product, int num_rows) {
  with_code(code, [&](auto type) { multiply_rows<decltype(type), G>(product, num_rows); });
}

// Rows that have no parameters of their own: [G] products with x.
template <int G>
inline void multiply_plain(int32_t code, const uint8_t* codes, Shape shape, const float* x, size_t x_stride, float* out,
                           size_t out_stride, Ahead first = {}, Ahead second = {}) {
  const float none[G] = {};
  const Part part = {codes, x};
  const size_t row_bytes = bytes_of(code, shape.length);
  multiply<G>(code, {&part, 1, row_bytes, shape.length, x_stride, none, out, out_stride, {first, second}}, shape.rows);
}

// A page that queries see `num_tokens` of.
struct Page {
  const uint8_t* bytes;  // a record, or this layer of a slot
  bool is_sealed;
  int num_tokens;
};

// `id`: see Rows.entries.
inline Page page_at(const Layer& layer, int64_t id, int num_tokens) {
  if (id >= 0) return {layer.sealed + id * layer.page_bytes, true, num_tokens};
  return {layer.open + (-1 - id) * layer.slot_bytes, false, num_tokens};
}

inline Page slot_half(const Layer& layer, const Page& page, int head, bool is_key) {
  const size_t head_bytes = layer.page_tokens * bytes_of(layer.slot_code, layer.head_dim);
  return {page.bytes + ((is_key ? 0 : layer.num_kv_heads) + head) * head_bytes, false, page.num_tokens};
}

// Where K or V of a page lies, and how many bytes of it there are for each of `num_rows` rows of another.
inline Ahead ahead_of(const Layer& layer, const Page& page, int head, bool is_key, int num_rows) {
  const Store& s = is_key ? layer.k : layer.v;
  const Shape shape = shape_of(layer, s);
  const int32_t code = page.is_sealed ? s.code : layer.slot_code;
  const uint8_t* bytes =
      page.is_sealed ? codes_of(s, page.bytes, head, shape) : slot_half(layer, page, head, is_key).bytes;
  return {bytes, bytes_of(code, (size_t)layer.page_tokens * layer.head_dim) / num_rows};
}

// Reads the parameters of K or V of a head of a sealed page long before they are used, and all at once, so that they are
// waited for together. Prefetches do not do it: those for pages of memory that the TLB does not know are dropped.
inline void touch_parameters(const Layer& layer, const Page& page, int head, bool is_key) {
  const Store& s = is_key ? layer.k : layer.v;
  if (!page.is_sealed || is_raw(s) || s.parameters == UNIT) return;
  const auto touch = [&](int64_t offset) { (void)*(const volatile uint8_t*)(page.bytes + offset); };
  const size_t count = (layer.page_tokens / s.group_tokens) * (layer.head_dim / s.group_channels);
  const size_t num_bytes = s.parameters == BYTE ? count : 2 * count;
  for (size_t n = head * num_bytes; n < (head + 1) * num_bytes; n += LINE) {
    touch(s.scale + n);
    if (s.zero_kind == STORED) touch(s.zero + n);
  }
  if (s.parameters == BYTE) touch(s.factor);
  for (int n = 0; is_key && layer.norm >= 0 && n < 2 * layer.page_tokens; n += LINE) touch(layer.norm + n);
}

// Logits of G queries: `out`, `scratch.tokens` apart, of a page's tokens and up to three numbers more. Memory is asked
// for the page's values and the keys of the `next` page, if any, meanwhile.
template <int G>
inline void add_logits(const Layer& layer, const Page& page, const Page* next, int head, float* out,
                       const Scratch& scratch) {
  const Store& s = layer.k;
  const size_t channels = layer.head_dim, tokens = page.num_tokens;
  const Ahead values = ahead_of(layer, page, head, false, tokens);
  touch_parameters(layer, page, head, false);
  if (next) touch_parameters(layer, *next, head, true);
  const Ahead keys = next ? ahead_of(layer, *next, head, true, tokens) : Ahead{};
  const auto plain = [&](int32_t code, const uint8_t* codes) {
    multiply_plain<G>(code, codes, {tokens, channels}, scratch.queries, scratch.channels, out, scratch.tokens, values,
                      keys);
  };
  if (!page.is_sealed) return plain(layer.slot_code, slot_half(layer, page, head, true).bytes);
  const uint8_t* codes = codes_of(s, page.bytes, head, {tokens, channels});
  if (is_raw(s)) {
    plain(s.code, codes);
  } else if (!s.folds) {
    unpack_tile(layer, s, page.bytes, head, scratch.tile, scratch);
    plain(FP32, (const uint8_t*)scratch.tile);
  } else {
    const size_t group = s.parameters == UNIT ? tokens : s.group_tokens, row_bytes = bytes_of(s.code, channels);
    const Head parameters(s, page.bytes, head, tokens / group * channels);
    for (size_t first = 0; first < tokens; first += group) {
      float zero_sums[G] = {};
      fold_parameters<G>(parameters, {first / group * channels, 1, channels, scratch.queries, scratch.channels,
                                      scratch.folded, scratch.longest, zero_sums});
      const Part part = {codes + first * row_bytes, scratch.folded};
      const Product product = {&part, 1, row_bytes, channels, scratch.longest, zero_sums, out + first, scratch.tokens,
                               {values.from(first), keys.from(first)}};
      multiply<G>(s.code, product, group);
    }
  }
  if (layer.norm < 0) return;
  for (size_t n = 0; n < tokens; n += LANES) {
    const uint8_t* norms = page.bytes + layer.norm;
    const Floats norm = halves_of(n + LANES <= tokens ? words_at(pointer<2>(Whole{}, norms, n))
                                                      : words_at(pointer<2>(Some{tokens - n}, norms, n)));
    for (int g = 0; g < G; ++g) {
      float* logits = out + g * scratch.tokens + n;
      store(logits, load(logits) * norm);
    }
  }
}

// Logits to weights 2^(logit - largest) and zeros behind them; returns the largest.
inline float weigh(float* logits, size_t num_tokens, size_t padded_tokens) {
  const size_t end = (num_tokens + LANES - 1) / LANES * LANES;
  for (size_t n = num_tokens; n < end; ++n) logits[n] = -__builtin_inff();
  Floats most = load(logits);
  for (size_t n = LANES; n < end; n += LANES) most = larger(load(logits + n), most);
  const float largest = largest_of(most);
  for (size_t n = 0; n < end; n += LANES) store(logits + n, exp2_of(load(logits + n) - largest));
  for (size_t n = num_tokens; n < padded_tokens; ++n) logits[n] = 0.0f;
  return largest;
}

// Weighted values of pages of 16-bit numbers, added to `scratch.sums`.
template <int G>
inline void add_raw_values(int32_t code, const uint8_t* values, const Layer& layer, int num_tokens,
                           const float* weights, const Scratch& scratch) {
  const auto add = [&](auto type) {
    add_rows<decltype(type), G>(values, bytes_of(code, layer.head_dim), num_tokens, layer.head_dim, weights,
                                scratch.tokens, scratch.sums, scratch.channels);
  };
  return code == FP32 ? add(Fp32Code{}) : code == BF16 ? add(Bf16Code{}) : add(Fp16Code{});
}

// The same of sealed pages whose V is in codes; `weights` are those of each page. A channel is summed up over all pages
// before its lanes are.
template <int G>
inline void add_values(const Layer& layer, const uint8_t* const* records, const float* const* weights, int num_pages,
                       int head, const Scratch& scratch) {
  const Store& s = layer.v;
  const size_t channels = layer.head_dim, tokens = layer.page_tokens, row_bytes = bytes_of(s.code, tokens);
  const auto add = [&](const float* products) {
    for (int g = 0; g < G; ++g)
      for (size_t n = g * scratch.channels; n < g * scratch.channels + channels; ++n) scratch.sums[n] += products[n];
  };
  for (int n = 0; !s.folds && n < num_pages; ++n) {
    unpack_tile(layer, s, records[n], head, scratch.tile, scratch);
    multiply_plain<G>(FP32, (const uint8_t*)scratch.tile, {channels, tokens}, weights[n], scratch.tokens,
                      scratch.products, scratch.channels);
    add(scratch.products);
  }
  if (!s.folds) return;
  const size_t group = s.parameters == UNIT ? channels : s.group_channels, num_groups = channels / group;
  for (size_t first = 0; first < channels; first += group) {
    float zero_sums[G] = {};
    Part parts[MOST_PAGES];
    for (int n = 0; n < num_pages; ++n) {
      float* folded = scratch.folded + n * MOST_QUERIES * scratch.longest;
      fold_parameters<G>(Head(s, records[n], head, num_groups * tokens),
                         {first / group, num_groups, tokens, weights[n], scratch.tokens, folded, scratch.longest,
                          zero_sums});
      parts[n] = {codes_of(s, records[n], head, {channels, tokens}) + first * row_bytes, folded};
    }
    const Product product = {parts, num_pages, row_bytes, tokens, scratch.longest, zero_sums, scratch.products + first,
                             scratch.channels, {}};
    multiply<G>(s.code, product, group);
  }
  add(scratch.products);
}

}  // namespace
