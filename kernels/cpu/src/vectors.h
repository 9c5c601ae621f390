// fp32 vectors of one instruction set, chosen by the flags that a file is compiled with. All of it is in an unnamed
// namespace: the linker must never take a function that was compiled for another instruction set. So no templates of
// the standard library either.
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

inline Floats load(const float* from) {
  Floats v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Floats v) { __builtin_memcpy(to, &v, sizeof v); }
inline Floats splat(float x) { return Floats{} + x; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats floats_of(Ints v) { return __builtin_convertvector(v, Floats); }

#if defined(__AVX512F__)
typedef uint16_t Words __attribute__((vector_size(2 * LANES)));
inline __m128i sixteen(const uint8_t* from) { return _mm_loadu_si128((const __m128i*)from); }
inline Ints wide_bytes(const uint8_t* from) { return (Ints)_mm512_cvtepu8_epi32(sixteen(from)); }
inline Ints wide_signed(const uint8_t* from) { return (Ints)_mm512_cvtepi8_epi32(sixteen(from)); }
inline Ints wide_words(const uint8_t* from) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
inline Words words_of_bytes(const uint8_t* from) { return (Words)_mm256_cvtepu8_epi16(sixteen(from)); }
inline Words words_of_signed(const uint8_t* from) { return (Words)_mm256_cvtepi8_epi16(sixteen(from)); }
inline Floats halves_of(Words v) { return (Floats)_mm512_cvtph_ps((__m256i)v); }
#elif defined(__AVX2__)
typedef uint16_t Words __attribute__((vector_size(2 * LANES)));
inline __m128i eight(const uint8_t* from) { return _mm_loadl_epi64((const __m128i*)from); }
inline Ints wide_bytes(const uint8_t* from) { return (Ints)_mm256_cvtepu8_epi32(eight(from)); }
inline Ints wide_signed(const uint8_t* from) { return (Ints)_mm256_cvtepi8_epi32(eight(from)); }
inline Ints wide_words(const uint8_t* from) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}
inline Words words_of_bytes(const uint8_t* from) { return (Words)_mm_cvtepu8_epi16(eight(from)); }
inline Words words_of_signed(const uint8_t* from) { return (Words)_mm_cvtepi8_epi16(eight(from)); }
inline Floats halves_of(Words v) { return (Floats)_mm256_cvtph_ps((__m128i)v); }
#else
typedef Ints Words;  // a word in each 32-bit lane
template <class Number>
inline Ints widened(const uint8_t* from) {
  Number numbers[LANES];
  __builtin_memcpy(numbers, from, sizeof numbers);
  Ints v;
  for (int lane = 0; lane < LANES; ++lane) v[lane] = numbers[lane];
  return v;
}
inline Ints wide_bytes(const uint8_t* from) { return widened<uint8_t>(from); }
inline Ints wide_signed(const uint8_t* from) { return widened<int8_t>(from); }
inline Ints wide_words(const uint8_t* from) { return widened<uint16_t>(from); }
inline Words words_of_bytes(const uint8_t* from) { return wide_bytes(from); }
inline Words words_of_signed(const uint8_t* from) { return wide_signed(from); }
inline Floats halves_of(Words v) {
  const Ints magnitude = (v & 0x7FFF) << 13;
  Ints bits = bits_of<Ints>(bits_of<Floats>(magnitude) * 0x1p112f);  // subnormal numbers come out right
  bits |= (magnitude >= 0x7C00 << 13) & 0x7F800000;                    // infinities, NaN
  return bits_of<Floats>(bits | (v & 0x8000) << 16);
}
#endif

inline Floats floats_at(const uint8_t* from) {
  Floats v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

inline float half_at(const uint8_t* from) {
  uint16_t word;
  __builtin_memcpy(&word, from, sizeof word);
#if defined(__AVX2__)
  return _cvtsh_ss(word);
#else
  return halves_of(Ints{} + word)[0];
#endif
}

inline Ints ints_at(const uint8_t* from) {
  Ints v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

inline Words words_at(const uint8_t* from) {
#if defined(__AVX2__)
  Words v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
#else
  return wide_words(from);
#endif
}

typedef float Four __attribute__((vector_size(16)));

// The sums of the lanes of four vectors, side by side.
inline Four sums_of(Floats a, Floats b, Floats c, Floats d) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const auto half = [](Floats v) {
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  };
#else
  const auto half = [](Floats v) { return (__m256)v; };
#endif
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)), _mm256_hadd_ps(half(c), half(d)));
  return (Four)_mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
#else
  const auto sum = [](Floats v) {
    for (int half = LANES / 2; half > 0; half /= 2)
      for (int lane = 0; lane < half; ++lane) v[lane] += v[lane + half];
    return v[0];
  };
  return Four{sum(a), sum(b), sum(c), sum(d)};
#endif
}

inline float sum_of(Floats v) { return sums_of(v, v, v, v)[0]; }

inline float largest_of(Floats v) {
  float most = v[0];
  for (int lane = 1; lane < LANES; ++lane) most = v[lane] > most ? v[lane] : most;
  return most;
}

// 2^x for x up to 126; below -126 it is 2^-126, NaN stays NaN. The fraction in [-0.5, 0.5] goes through a polynomial,
// fitted for the smallest largest relative error (2e-9); the rest are roundings of fp32.
inline Floats exp2_of(Floats x) {
  x = x < -126.0f ? splat(-126.0f) : x;
  const Floats shifted = x + 0x1.8p23f;  // the integer nearest to x is in its lowest bits
  const Floats f = x - (shifted - 0x1.8p23f);
  Floats y = f * 1.5353362e-4f + 1.3398875e-3f;
  y = y * f + 9.618437e-3f;
  y = y * f + 5.5503324e-2f;
  y = y * f + 2.4022648e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  return y * bits_of<Floats>((bits_of<Ints>(shifted) << 23) + bits_of<int32_t>(1.0f));
}

inline float exp2_of(float x) { return exp2_of(splat(x))[0]; }

// Where a vector of numbers is read from: all of it; the last few of a row, and zeros in place of what lies behind them
// and may not be read; or numbers that are `stride` apart. `pointer` leads to them, number j on, each of SIZE bytes.
struct Whole {};

struct Some {
  size_t count;
};

struct Strided {
  size_t count, stride;
};

template <int SIZE>
struct Gathered {
  alignas(64) uint8_t data[SIZE * LANES < 16 ? 16 : SIZE * LANES];
  operator const uint8_t*() const { return data; }
};

template <int SIZE>
inline const uint8_t* pointer(Whole, const uint8_t* row, size_t j) { return row + SIZE * j; }

template <int SIZE>
inline Gathered<SIZE> pointer(Some from, const uint8_t* row, size_t j) {
  Gathered<SIZE> gathered = {};
  __builtin_memcpy(gathered.data, row + SIZE * j, SIZE * from.count);
  return gathered;
}

template <int SIZE>
inline Gathered<SIZE> pointer(Strided from, const uint8_t* row, size_t j) {
  Gathered<SIZE> gathered = {};
  for (size_t lane = 0; lane < from.count; ++lane)
    __builtin_memcpy(gathered.data + SIZE * lane, row + SIZE * (j + lane) * from.stride, SIZE);
  return gathered;
}

}  // namespace
