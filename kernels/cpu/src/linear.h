// Products with weights. A row's sums are made in one order, whatever rows there are beside it.
#pragma once
#include "codes.h"
#include "threads.h"

namespace {

constexpr int WIDTH = 2;  // vectors of outputs in a block
constexpr int BLOCK = WIDTH * LANES;
constexpr int MOST_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;  // at a time: their sums have to stay in registers
constexpr int GROUP_ROWS = 8 * MOST_ROWS;                          // that meet a block while it is in the cache

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls `use` with a number of rows, up to MOST_ROWS, as a type.
template <int M = MOST_ROWS, class Use>
inline void with_count(int num_rows, Use use) {
  if (num_rows == M) return use(Count<M>{});
  if constexpr (M > 1) with_count<M - 1>(num_rows, use);
}

// Adds a [M, depth] . b [depth, BLOCK] to `sums`. `a_stride`: numbers, `b_step`: bytes from row to row. HAS_NEXT: another
// such b lies behind this one and is asked for.
template <class Code, bool HAS_NEXT, int M>
inline void sum_block(Floats (&sums)[M][WIDTH], const float* a, size_t a_stride, const uint8_t* b, size_t b_step,
                      size_t depth) {
  const uint8_t* next = b + depth * b_step;
  for (size_t k = 0; k < depth; ++k, b += b_step, next += b_step) {
    if (HAS_NEXT) __builtin_prefetch(next);
    Floats numbers[WIDTH];
    for (int v = 0; v < WIDTH; ++v) numbers[v] = Code::number(Code::load(Whole{}, b, 0, v * LANES), 0);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < WIDTH; ++v) sums[m][v] += a[m * a_stride + k] * numbers[v];
  }
}

// The BLOCK outputs of one block for M rows.
template <class Code, int M>
inline void multiply_weights(const Linear& s, const uint8_t* weights, const float* x, float* y, int first) {
  Floats sums[M][WIDTH] = {};
  sum_block<Code, true>(sums, x, s.num_inputs, weights, BLOCK * bytes_of(s.code, 1), s.num_inputs);
  const int count = s.num_outputs - first < BLOCK ? s.num_outputs - first : BLOCK;
  for (int m = 0; m < M; ++m) {
    float out[BLOCK];
    __builtin_memcpy(out, sums[m], sizeof out);
    if (s.bias)
      for (int n = 0; n < count; ++n) out[n] += s.bias[first + n];
    __builtin_memcpy(y + m * s.num_outputs + first, out, 4 * count);
  }
}

// `y` [num_rows, outputs] of `x` [num_rows, inputs], fp32.
inline void multiply(Worker& worker, const Linear& s, const float* x, float* y, int num_rows) {
  const int num_blocks = (s.num_outputs + BLOCK - 1) / BLOCK, num_groups = (num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
  const int64_t block_bytes = s.num_inputs * BLOCK * bytes_of(s.code, 1);
  const int count = num_blocks * num_groups, at_once = count / (8 * worker.num_threads) + 1;
  worker.share(count, at_once, [&](int item) {
    const int block = item % num_blocks, first = item / num_blocks * GROUP_ROWS;
    const int rows = num_rows - first < GROUP_ROWS ? num_rows - first : GROUP_ROWS;
    const int num_parts = (rows + MOST_ROWS - 1) / MOST_ROWS;  // as equal as can be: a few rows take as long as many
    for (int part = 0; part < num_parts; ++part) {
      const int row = rows * part / num_parts, size = rows * (part + 1) / num_parts - row;
      const float* inputs = x + (first + row) * s.num_inputs;
      float* outputs = y + (first + row) * s.num_outputs;
      const uint8_t* weights = s.weights + block * block_bytes;
      with_count(size, [&](auto m) {
        constexpr int M = decltype(m)::value;
        switch (s.code) {
          case FP32: return multiply_weights<Fp32Code, M>(s, weights, inputs, outputs, block * BLOCK);
          case BF16: return multiply_weights<Bf16Code, M>(s, weights, inputs, outputs, block * BLOCK);
          default: return multiply_weights<Fp16Code, M>(s, weights, inputs, outputs, block * BLOCK);
        }
      });
    }
  });
}

}  // namespace
