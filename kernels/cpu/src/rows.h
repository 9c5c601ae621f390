// Products of rows of codes with a few vectors of fp32 ("queries": of Q for K, of weights for V). Each row is unpacked
// once in registers for all G queries.
//
// A vector of L numbers takes `padded(L)` fp32; those behind L are zero, since they meet what is read in place of codes
// that are missing.
#pragma once
#include "codes.h"

namespace {

constexpr size_t LINE = 64;      // bytes of a cache
constexpr int MOST_QUERIES = 4;  // at a time; larger groups take turns

inline size_t padded(size_t length) { return (length + 15) / 16 * 16 + 16; }

// How many rows are summed up at once: their sums have to stay in registers.
constexpr int rows_at_once(int num_queries) { return LANES == 16 || num_queries <= 3 ? 4 : 2; }

template <class Code, int G, int R, class From>
inline void add_products(Floats (&sums)[R][G], From from, const uint8_t* rows, size_t row_bytes, size_t plane, size_t j,
                         const float* x, size_t x_stride) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const typename Code::Raw raw = Code::load(from, rows + r * row_bytes, plane, j);
#pragma GCC unroll 8
    for (int p = 0; p < Code::PLANES; ++p) {
      const Floats numbers = Code::number(raw, p);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) sums[r][g] += numbers * load(x + g * x_stride + p * plane + j);
    }
  }
}

// Rows of one or more pages that have a place in common (a channel of V), and what they meet.
struct Part {
  const uint8_t* codes;
  const float* x;  // [G], `x_stride` apart
};

// Bytes that will be read soon: so many of them are asked for with each row.
struct Ahead {
  const uint8_t* bytes;
  size_t per_row;

  Ahead from(size_t row) const { return {bytes + row * per_row, per_row}; }

  void fetch(int row, int num_rows) const {
    for (size_t n = row * per_row / LINE; n < (row + num_rows) * per_row / LINE; ++n)
      __builtin_prefetch(bytes + LINE * n);
  }
};

struct Product {
  const Part* parts;
  int num_parts;
  size_t row_bytes, length, x_stride;
  const float* add;  // [G]
  float* out;        // [G], `out_stride` apart
  size_t out_stride;
  Ahead ahead[2];
};

template <class Code, int G, int R>
inline void sum_rows(Floats (&sums)[R][G], const Product& product, size_t offset, size_t row_bytes) {
  const size_t plane = product.length / Code::PLANES;
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) sums[r][g] = splat(0.0f);
  for (int n = 0; n < product.num_parts; ++n) {
    const Part part = product.parts[n];
    const uint8_t* rows = part.codes + offset;
    size_t j = 0;
    for (; j + LANES <= plane; j += LANES)
      add_products<Code, G, R>(sums, Whole{}, rows, row_bytes, plane, j, part.x, product.x_stride);
    if (j < plane)
      add_products<Code, G, R>(sums, Some{plane - j}, rows, row_bytes, plane, j, part.x, product.x_stride);
  }
}

template <int G>
inline void put_sums(const Product& product, int row, const Floats (&a)[G], const Floats (&b)[G], const Floats (&c)[G],
                     const Floats (&d)[G]) {
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    const Four result = sums_of(a[g], b[g], c[g], d[g]) + product.add[g];
    __builtin_memcpy(product.out + g * product.out_stride + row, &result, sizeof result);
  }
}

// out[g][row] = the sum over parts of row . x[g], + add[g], for `num_rows` rows, and up to three numbers behind them
// that mean nothing.
template <class Code, int G>
inline void multiply_rows(const Product product, int num_rows) {  // by value: what is stored cannot change it
  constexpr int R = rows_at_once(G);
  int row = 0;
  for (; row + 4 <= num_rows; row += 4) {
    for (const Ahead& ahead : product.ahead) ahead.fetch(row, 4);
    Floats sums[4 / R][R][G];
#pragma GCC unroll 4
    for (int n = 0; n < 4 / R; ++n)
      sum_rows<Code, G, R>(sums[n], product, (row + n * R) * product.row_bytes, product.row_bytes);
    put_sums<G>(product, row, sums[0][0], sums[1 / R][1 % R], sums[2 / R][2 % R], sums[3 / R][3 % R]);
  }
  for (; row < num_rows; ++row) {
    Floats sums[1][G];
    sum_rows<Code, G, 1>(sums, product, row * product.row_bytes, 0);
    put_sums<G>(product, row, sums[0], sums[0], sums[0], sums[0]);
  }
}

template <class Code, int G, int B, class From>
inline void add_columns(From from, const uint8_t* codes, size_t row_bytes, int num_rows, size_t j, const float* weights,
                        size_t weight_stride, float* sums, size_t stride) {
  Floats total[B][G];
  for (int b = 0; b < B; ++b)
    for (int g = 0; g < G; ++g) total[b][g] = load(sums + g * stride + j + b * LANES);
  for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      const Floats numbers = Code::number(Code::load(from, codes + row * row_bytes, 0, j + b * LANES), 0);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) total[b][g] += numbers * weights[g * weight_stride + row];
    }
  }
  for (int b = 0; b < B; ++b)
    for (int g = 0; g < G; ++g) store(sums + g * stride + j + b * LANES, total[b][g]);
}

// sums[g] += the sum of rows by weights[g][row], for codes of one plane.
template <class Code, int G>
inline void add_rows(const uint8_t* codes, size_t row_bytes, int num_rows, size_t length, const float* weights,
                     size_t weight_stride, float* sums, size_t stride) {
  constexpr int B = G <= 2 ? 4 : 2;
  size_t j = 0;
  for (; j + B * LANES <= length; j += B * LANES)
    add_columns<Code, G, B>(Whole{}, codes, row_bytes, num_rows, j, weights, weight_stride, sums, stride);
  for (; j + LANES <= length; j += LANES)
    add_columns<Code, G, 1>(Whole{}, codes, row_bytes, num_rows, j, weights, weight_stride, sums, stride);
  if (j < length)
    add_columns<Code, G, 1>(Some{length - j}, codes, row_bytes, num_rows, j, weights, weight_stride, sums, stride);
}

// A row's numbers as fp32.
template <class Code>
inline void unpack_row(const uint8_t* row, size_t length, float* out) {
  const size_t plane = length / Code::PLANES;
  for (size_t j = 0; j < plane; j += LANES) {
    const bool is_whole = j + LANES <= plane;
    const typename Code::Raw raw =
        is_whole ? Code::load(Whole{}, row, plane, j) : Code::load(Some{plane - j}, row, plane, j);
    for (int p = 0; p < Code::PLANES; ++p) {
      const Floats numbers = Code::number(raw, p);
      __builtin_memcpy(out + p * plane + j, &numbers, 4 * (is_whole ? LANES : plane - j));
    }
  }
}

}  // namespace
