// How bytes become numbers. A row of L codes has `PLANES` planes of L / PLANES; `load` reads what places j on of all of
// them need, and `number` gives those of one plane as fp32 (docs/kv_layout.md).
#pragma once
#include "abi.h"
#include "vectors.h"

namespace {

struct Fp32Code {
  static constexpr int PLANES = 1;
  struct Raw { Floats numbers; };
  template <class From>
  static Raw load(From from, const uint8_t* row, size_t, size_t j) { return {floats_at(pointer<4>(from, row, j))}; }
  static Floats number(Raw raw, int) { return raw.numbers; }
};

struct Bf16Code {
  static constexpr int PLANES = 1;
  struct Raw { Ints words; };
  template <class From>
  static Raw load(From from, const uint8_t* row, size_t, size_t j) { return {wide_words(pointer<2>(from, row, j))}; }
  static Floats number(Raw raw, int) { return bits_of<Floats>(raw.words << 16); }
};

struct Fp16Code {
  static constexpr int PLANES = 1;
  struct Raw { Words words; };
  template <class From>
  static Raw load(From from, const uint8_t* row, size_t, size_t j) { return {words_at(pointer<2>(from, row, j))}; }
  static Floats number(Raw raw, int) { return halves_of(raw.words); }
};

template <int BITS>  // 8, 4, 2
struct IntCode {
  static constexpr int PLANES = 8 / BITS;
  struct Raw { Ints bytes; };
  template <class From>
  static Raw load(From from, const uint8_t* row, size_t, size_t j) { return {wide_bytes(pointer<1>(from, row, j))}; }
  static Floats number(Raw raw, int plane) {
    Ints code = raw.bytes;
    if (plane > 0) code = code >> (BITS * plane);
    if (plane < PLANES - 1) code = code & ((1 << BITS) - 1);
    return floats_of(code);
  }
};

// Four planes of the two low bits, then eight of the high one. Both halves of a low plane are read at once.
struct Int3Code {
  static constexpr int PLANES = 8;
  struct Raw { Ints low[2], high; };
  template <class From>
  static Raw load(From from, const uint8_t* row, size_t plane, size_t j) {
    return {{wide_bytes(pointer<1>(from, row, j)), wide_bytes(pointer<1>(from, row + plane, j))},
            wide_bytes(pointer<1>(from, row + 2 * plane, j))};
  }
  static Floats number(Raw raw, int plane) {
    Ints low = raw.low[plane % 2], high = raw.high;
    if (plane >= 2) low = low >> (plane / 2 * 2);
    if (plane <= 2) high = high << (2 - plane);
    if (plane > 2) high = high >> (plane - 2);
    return floats_of((low & 3) | (high & 4));
  }
};

// As fp16 whose exponent is 8 less than it should be: `FACTOR` makes up for it. Stored codes are never NaN, but pages
// that are filled with 0xFF (`--poison`) have to be.
struct E4m3Code {
  static constexpr int PLANES = 1;
  static constexpr float FACTOR = 256.0f;
  struct Raw { Words words; };
  template <class From>
  static Raw load(From from, const uint8_t* row, size_t, size_t j) {
    return {words_of_signed(pointer<1>(from, row, j))};
  }
  static Floats number(Raw raw, int) {
    const Words all_ones = (Words)(raw.words == (Words{} - 1));
    return halves_of(((raw.words << 7) & 0xBFFF) | all_ones);
  }
};

struct E5m2Code {  // the top byte of fp16
  static constexpr int PLANES = 1;
  struct Raw { Words words; };
  template <class From>
  static Raw load(From from, const uint8_t* row, size_t, size_t j) {
    return {words_of_bytes(pointer<1>(from, row, j))};
  }
  static Floats number(Raw raw, int) { return halves_of(raw.words << 8); }
};

// What numbers of a code are to be multiplied with beside their scale.
inline float factor_of(int32_t code) { return code == E4M3 ? E4m3Code::FACTOR : 1.0f; }

inline size_t bytes_of(int32_t code, size_t count) {
  switch (code) {
    case FP32: return 4 * count;
    case BF16: case FP16: return 2 * count;
    case INT4: return count / 2;
    case INT3: return count / 8 * 3;
    case INT2: return count / 4;
    default: return count;
  }
}

// Calls `use` with the type that knows `code`.
template <class Use>
inline void with_code(int32_t code, Use use) {
  switch (code) {
    case FP32: return use(Fp32Code{});
    case BF16: return use(Bf16Code{});
    case FP16: return use(Fp16Code{});
    case INT8: return use(IntCode<8>{});
    case INT4: return use(IntCode<4>{});
    case INT3: return use(Int3Code{});
    case INT2: return use(IntCode<2>{});
    case E4M3: return use(E4m3Code{});
    case E5M2: return use(E5m2Code{});
  }
}

}  // namespace
