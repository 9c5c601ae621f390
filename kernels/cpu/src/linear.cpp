// Products with weights, for one instruction set. A row's sums are made in one order, whatever rows there are beside it.
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
  for (int64_t k = 0; k < s.num_inputs; ++k, weights += step) {
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
  for (; num_rows >= M; num_rows -= M, x += M * s.num_inputs, y += M * s.num_outputs)
    add_block<Code, M>(s, weights, x, y, first);
  if constexpr (M > 1) add_rows<Code, M - 1>(s, weights, x, y, first, num_rows);
}

}  // namespace

EXPORT(int quire_linear_block)() { return BLOCK; }

// `y` [num_rows, outputs] of `x` [num_rows, inputs], fp32.
EXPORT(void quire_linear)(const Linear* linear, const float* x, float* y, int num_rows, int num_threads) {
  const Linear& s = *linear;
  const int num_blocks = (s.num_outputs + BLOCK - 1) / BLOCK, num_groups = (num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
  const int64_t block_bytes = s.num_inputs * BLOCK * bytes_of(s.code, 1);
  const int count = num_blocks * num_groups, at_once = count / (8 * num_threads) + 1;
  share(count, at_once, num_threads, [&](int item) {
    const int block = item % num_blocks, row = item / num_blocks * GROUP_ROWS;
    const int rows = num_rows - row < GROUP_ROWS ? num_rows - row : GROUP_ROWS;
    const uint8_t* weights = s.weights + block * block_bytes;
    const float* inputs = x + row * s.num_inputs;
    float* outputs = y + row * s.num_outputs;
    switch (s.code) {
      case FP32: return add_rows<Fp32Code>(s, weights, inputs, outputs, block * BLOCK, rows);
      case BF16: return add_rows<Bf16Code>(s, weights, inputs, outputs, block * BLOCK, rows);
      default: return add_rows<Fp16Code>(s, weights, inputs, outputs, block * BLOCK, rows);
    }
  });
}
