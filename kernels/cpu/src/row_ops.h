// What happens to each row beside products and attention (kernels/row_ops.py). All is fp32.
#pragma once
#include "codes.h"
#include "threads.h"

namespace {

template <class Work>
inline void share_rows(Worker& worker, int num_rows, Work work) {
  worker.share(num_rows, num_rows / (4 * worker.num_threads) + 1, work);
}

// LANES numbers from place j on of `count`; zeros behind the last.
inline Floats get(const float* from, int64_t j, int64_t count) {
  if (j + LANES <= count) return load(from + j);
  return floats_at(pointer<4>(Some{(size_t)(count - j)}, (const uint8_t*)from, j));
}

inline void put(float* to, int64_t j, int64_t count, Floats v) {
  __builtin_memcpy(to + j, &v, count - j < LANES ? 4 * (count - j) : sizeof v);
}

inline void normalise(const float* x, const float* weight, float* y, int64_t width, float eps) {
  Floats squares = splat(0.0f);
  for (int64_t j = 0; j < width; j += LANES) {
    const Floats v = get(x, j, width);
    squares += v * v;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum_of(squares) / width + eps);
  for (int64_t j = 0; j < width; j += LANES) put(y, j, width, get(x, j, width) * factor * get(weight, j, width));
}

// The channels j and j + half turn together (kernels/rope.py). In place.
inline void apply_rope(float* x, const float* cos, const float* sin, int half) {
  for (int j = 0; j < half; j += LANES) {
    const Floats first = get(x, j, half), second = get(x + half, j, half), c = get(cos, j, half), s = get(sin, j, half);
    put(x, j, half, first * c - second * s);
    put(x + half, j, half, second * c + first * s);
  }
}

// Times `hadamard(size)` (kernels/format/hadamard.py), by its butterflies. In place.
inline void rotate(float* x, int size) {
  const int block = size & -size;
  for (int half = 1; half < block; half *= 2)
    for (int first = 0; first < size; first += 2 * half)
      for (int j = first; j < first + half; ++j) {
        const float left = x[j], right = x[j + half];
        x[j] = left + right, x[j + half] = left - right;
      }
  const float factor = 1.0f / __builtin_sqrtf(block);
  for (int j = 0; j < size; ++j) x[j] *= factor;
}

// `y` [rows, width]: the RMSNorm of `x`; of `x + delta`, which is left in `total`, if there is a `delta`.
inline void normalise_rows(Worker& worker, const float* x, const float* delta, const float* weight, float* total, float* y,
                           int num_rows, int64_t width, float eps) {
  share_rows(worker, num_rows, [&](int row) {
    const int64_t first = row * width;
    if (delta)
      for (int64_t j = 0; j < width; ++j) total[first + j] = x[first + j] + delta[first + j];
    normalise((delta ? total : x) + first, weight, y + first, width, eps);
  });
}

// `y` [rows, width]: silu(gate) up, of `x` [rows, 2 width].
inline void gate_rows(Worker& worker, const float* x, float* y, int num_rows, int64_t width) {
  share_rows(worker, num_rows, [&](int row) {
    const float* gates = x + 2 * row * width;
    for (int64_t j = 0; j < width; j += LANES) {
      const Floats gate = get(gates, j, width), power = gate * -1.44269504088896341f;
      const Floats opened = gate / (1.0f + exp2_of(power > 126.0f ? splat(126.0f) : power));
      put(y + row * width, j, width, (power > 126.0f ? splat(0.0f) : opened) * get(gates + width, j, width));
    }
  });
}

// `RowOps.turn` of one row: `qkv` to `q` [heads, D] and `kv` [2 kv_heads, D]; `cos`, `sin` [D / 2].
inline void turn(const Heads& s, const float* qkv, const float* cos, const float* sin, const float* norm,
                 const float* balance, float* q, float* kv, float eps) {
  const int size = s.head_dim, num_turned = s.num_heads + s.num_kv_heads;
  for (int head = 0; head < num_turned + s.num_kv_heads; ++head) {
    const bool is_q = head < s.num_heads;
    float* to = is_q ? q + head * size : kv + (head - s.num_heads) * size;
    if (norm && head < num_turned)
      normalise(qkv + head * size, norm + head * size, to, size, eps);
    else
      __builtin_memcpy(to, qkv + head * size, 4 * size);
    if (head >= num_turned) continue;
    if (is_q || !s.stores_before_rope) apply_rope(to, cos, sin, size / 2);
    if (balance)
      for (int j = 0; j < size; ++j) to[j] *= balance[head * size + j];
    if (s.is_rotated && !(is_q && s.stores_before_rope)) rotate(to, size);
  }
}

}  // namespace
