// Products with weights. A row's sums are made in one order, whatever rows there are beside it.
#pragma once
#include "codes.h"
#include "threads.h"

namespace {

constexpr int WIDTH = 2;  // vectors of outputs in a block
constexpr int BLOCK = WIDTH * LANES;
constexpr int MOST_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;  // at a time: their sums have to stay in registers
constexpr int GROUP_ROWS = 8 * MOST_ROWS;                          // that meet a block while it is in the cache

// The BLOCK outputs of one block for M rows.
template <class Code, int M>
inline void add_block(const Linear& s, const uint8_t* weights, const float* x, float* y, int first) {
  Floats sums[M][WIDTH] = {};
  const int64_t step = BLOCK * bytes_of(s.code, 1);
  const uint8_t* ahead = weights + s.num_inputs * step;
  for (int64_t k = 0; k < s.num_inputs; ++k, weights += step, ahead += step) {
    __builtin_prefetch(ahead);
    Floats numbers[WIDTH];
    for (int v = 0; v < WIDTH; ++v) numbers[v] = Code::number(Code::load(Whole{}, weights, 0, v * LANES), 0);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const float input = x[m * s.num_inputs + k];
      for (int v = 0; v < WIDTH; ++v) sums[m][v] += input * numbers[v];
    }
  }
  const int count = s.num_outputs - first < BLOCK ? s.num_outputs - first : BLOCK;
  for (int m = 0; m < M; ++m) {
    float out[BLOCK];
    __builtin_memcpy(out, sums[m], sizeof out);
    if (s.bias)
      for (int n = 0; n < count; ++n) out[n] += s.bias[first + n];
    __builtin_memcpy(y + m * s.num_outputs + first, out, 4 * count);
  }
}

template <class Code, int M = MOST_ROWS>
inline void add_rows(const Linear& s, const uint8_t* weights, const float* x, float* y, int first, int num_rows) {
  if (num_rows == M) return add_block<Code, M>(s, weights, x, y, first);
  if constexpr (M > 1) add_rows<Code, M - 1>(s, weights, x, y, first, num_rows);
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
      switch (s.code) {
        case FP32: add_rows<Fp32Code>(s, weights, inputs, outputs, block * BLOCK, size); break;
        case BF16: add_rows<Bf16Code>(s, weights, inputs, outputs, block * BLOCK, size); break;
        default: add_rows<Fp16Code>(s, weights, inputs, outputs, block * BLOCK, size);
      }
    }
  });
}

}  // namespace
