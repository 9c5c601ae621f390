// Scales and zeros: folded into the queries that meet codes, or read as fp32.
//
// A row is scale * code + zero. Against x, with x' = x * scale, it is x' . code + sum(x * zero). In 8 bits zeros count
// in scales, so that the sum is unit * sum(x' * zero); where zeros follow from scales it is -centre * sum(x').
#pragma once
#include "rows.h"

namespace {

template <class From>
inline Floats scales_at(int32_t kind, From from, const uint8_t* scales, size_t j) {
  return kind == BYTE ? halves_of(words_of_bytes(pointer<1>(from, scales, j)) << 6)
                      : halves_of(words_at(pointer<2>(from, scales, j)));
}

template <class From>
inline Floats zeros_at(int32_t kind, From from, const uint8_t* zeros, size_t j) {
  return kind == BYTE ? floats_of(wide_signed(pointer<1>(from, zeros, j)))
                      : halves_of(words_at(pointer<2>(from, zeros, j)));
}

// Numbers of one byte that are COUNT bytes apart, in the lowest byte of each lane of `all`. It reads up to three bytes
// behind the last one, which are of the record: a factor follows scales and zeros in 8 bits.
template <int COUNT>
struct Interleaved {
  Ints all(const uint8_t* from, size_t j) const {
    return COUNT == 2 ? wide_words(from + 2 * j) : ints_at(from + 4 * j);
  }
};

template <int COUNT>
inline Floats scales_at(int32_t, Interleaved<COUNT> from, const uint8_t* scales, size_t j) {
  const Ints code = from.all(scales, j) & 0xFF;  // bits 6 to 13 of fp16
  return code < 16 ? floats_of(code) * 0x1p-18f : bits_of<Floats>((code << 19) + (112 << 23));
}

template <int COUNT>
inline Floats zeros_at(int32_t, Interleaved<COUNT> from, const uint8_t* zeros, size_t j) {
  return floats_of(from.all(zeros, j) << 24 >> 24);
}

// What the parameters of a head of one store say beside scales and zeros of their own.
struct Head {
  const uint8_t *scales, *zeros;
  float factor;  // of all of a row
  int32_t parameters, zero_kind;
  float zero_unit;

  Head(const Store& s, const uint8_t* record, int head, size_t num_blocks)
      : parameters(s.parameters), zero_kind(s.zero_kind), zero_unit(s.zero_unit) {
    const size_t size = s.parameters == BYTE ? 1 : 2;
    scales = record + s.scale + head * num_blocks * size;
    zeros = record + s.zero + head * num_blocks * size;
    factor = factor_of(s.code) * (s.parameters == BYTE ? half_at(record + s.factor + 2 * head) : 1.0f);
  }
};

// G queries and what becomes of them: `to`, `to_stride` apart, gets x by the scales `first`, `first` + `stride`, … of a
// head, and `zero_sums[g]` is raised by the sum of x by zeros.
struct Fold {
  size_t first, stride, length;
  const float* x;
  size_t x_stride;
  float* to;
  size_t to_stride;
  float* zero_sums;
};

template <int32_t KIND, int32_t ZERO, int G, class From>
inline void fold_at(const Head& head, const Fold& fold, From from, size_t j, Floats (&zeros)[4]) {
  constexpr int SIZE = KIND == BYTE ? 1 : 2;
  Floats scale = splat(head.factor), zero = splat(0.0f);
  if (KIND != UNIT) scale *= scales_at(KIND, from, head.scales + SIZE * fold.first, j);
  if (ZERO == STORED) zero = zeros_at(KIND, from, head.zeros + SIZE * fold.first, j);
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    const Floats query = load(fold.x + g * fold.x_stride + j), product = query * scale;
    store(fold.to + g * fold.to_stride + j, product);
    if (ZERO == CENTRED) zeros[g] += product;
    if (ZERO == STORED) zeros[g] += (KIND == BYTE ? product : query) * zero;
  }
}

template <int32_t KIND, int32_t ZERO, int G>
inline void fold_all(const Head head, const Fold fold) {  // by value: what is stored cannot change them
  Floats zeros[4] = {};
  size_t j = 0;
  const auto whole = [&](auto from) {
    for (; j + LANES <= fold.length; j += LANES) fold_at<KIND, ZERO, G>(head, fold, from, j, zeros);
  };
  // groups of V: the parameters of all groups of a token lie side by side
  if (KIND == BYTE && fold.stride == 2) whole(Interleaved<2>{});
  if (KIND == BYTE && fold.stride == 4) whole(Interleaved<4>{});
  if (fold.stride > 1)
    for (; j < fold.length; j += LANES) {
      const size_t count = fold.length - j < LANES ? fold.length - j : LANES;
      fold_at<KIND, ZERO, G>(head, fold, Strided{count, fold.stride}, j, zeros);
    }
  whole(Whole{});
  if (j < fold.length) fold_at<KIND, ZERO, G>(head, fold, Some{fold.length - j}, j, zeros), j += LANES;
  for (int g = 0; g < G; ++g) store(fold.to + g * fold.to_stride + j, splat(0.0f));
  if (ZERO == NO_ZERO) return;
  const float unit = ZERO == CENTRED ? -head.zero_unit : KIND == BYTE ? head.zero_unit : 1.0f;
  const Four sums = sums_of(zeros[0], zeros[1], zeros[2], zeros[3]) * unit;
  for (int g = 0; g < G; ++g) fold.zero_sums[g] += sums[g];
}

template <int G>
__attribute__((noinline)) void fold_parameters(const Head& head, const Fold& fold) {
  if (head.parameters == UNIT) return fold_all<UNIT, NO_ZERO, G>(head, fold);
  if (head.parameters == BYTE) {
    if (head.zero_kind == STORED) return fold_all<BYTE, STORED, G>(head, fold);
    return head.zero_kind == CENTRED ? fold_all<BYTE, CENTRED, G>(head, fold) : fold_all<BYTE, NO_ZERO, G>(head, fold);
  }
  if (head.zero_kind == STORED) return fold_all<HALF, STORED, G>(head, fold);
  return head.zero_kind == CENTRED ? fold_all<HALF, CENTRED, G>(head, fold) : fold_all<HALF, NO_ZERO, G>(head, fold);
}

// All `count` scales and zeros of a head as fp32, in the order in which they are stored. Room for LANES more.
inline void read_parameters(const Head& head, size_t count, float* scales, float* zeros) {
  const auto read = [&](auto from, size_t j) {
    Floats scale = head.parameters == UNIT ? splat(1.0f) : scales_at(head.parameters, from, head.scales, j);
    Floats zero = splat(0.0f);
    if (head.zero_kind == CENTRED) zero = scale * -head.zero_unit;
    if (head.zero_kind == STORED) {
      zero = zeros_at(head.parameters, from, head.zeros, j);
      if (head.parameters == BYTE) zero = zero * (scale * head.zero_unit);
    }
    // the factor of a code belongs to its number alone, but such codes have no zero
    store(scales + j, scale * head.factor);
    store(zeros + j, zero * head.factor);
  };
  size_t j = 0;
  for (; j + LANES <= count; j += LANES) read(Whole{}, j);
  if (j < count) read(Some{count - j}, j);
}

}  // namespace
