// What Python calls, for one instruction set: QUIRE_PATH is its name (kernels/cpu/build.py).
#include "decode.h"
#include "prefill.h"

#define JOINED(name, path) name##_##path
#define NAMED(name, path) JOINED(name, path)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) NAMED(name, QUIRE_PATH)

namespace {

constexpr int64_t LEAST = 1 << 14;  // numbers in rows that are worth a second thread

inline int threads_for(int num_rows, int64_t width, int num_threads) {
  return num_rows * width < LEAST ? 1 : num_threads;
}

}  // namespace

EXPORT(void quire_attend)(const Layer* layer, const Rows* rows, const Buffers* buffers, int num_threads) {
  with_team(num_threads, [&](Worker& worker) { attend_rows(worker, *layer, *rows, *buffers); });
}

EXPORT(void quire_attend_chunk)(const Layer* layer, const Chunk* chunk, int num_threads) {
  with_team(num_threads, [&](Worker& worker) { attend_chunk(worker, *layer, *chunk); });
}

// What each thread needs.
EXPORT(int64_t quire_chunk_scratch_bytes)(const Layer* layer) {
  TileScratch scratch;
  return (scratch.place(*layer, nullptr) - (float*)nullptr) * 4;
}

EXPORT(int64_t quire_scratch_bytes)(const Layer* layer) {
  Scratch scratch;
  return (scratch.place(*layer, nullptr) - (float*)nullptr) * 4;
}

EXPORT(int quire_linear_block)() { return BLOCK; }

EXPORT(void quire_linear)(const Linear* linear, const float* x, float* y, int num_rows, int num_threads) {
  with_team(num_threads, [&](Worker& worker) { multiply(worker, *linear, x, y, num_rows); });
}

EXPORT(void quire_normalise)(const float* x, const float* delta, const float* weight, float* total, float* y,
                             int num_rows, int64_t width, float eps, int num_threads) {
  with_team(threads_for(num_rows, width, num_threads), [&](Worker& worker) {
    normalise_rows(worker, x, delta, weight, total, y, num_rows, width, eps);
  });
}

EXPORT(void quire_gate)(const float* x, float* y, int num_rows, int64_t width, int num_threads) {
  with_team(threads_for(num_rows, width, num_threads),
            [&](Worker& worker) { gate_rows(worker, x, y, num_rows, width); });
}

// `q` [rows, heads, D], `kv` [rows, 2 kv_heads, D]; `cos`, `sin` [rows, D / 2].
EXPORT(void quire_turn)(const Heads* heads, const float* qkv, const float* cos, const float* sin, const float* norm,
                        const float* balance, float* q, float* kv, int num_rows, float eps, int num_threads) {
  const int64_t size = heads->head_dim, q_width = heads->num_heads * size, kv_width = 2 * heads->num_kv_heads * size;
  with_team(threads_for(num_rows, q_width + kv_width, num_threads), [&](Worker& worker) {
    share_rows(worker, num_rows, [&](int row) {
      turn(*heads, qkv + row * (q_width + kv_width), cos + row * size / 2, sin + row * size / 2, norm, balance,
           q + row * q_width, kv + row * kv_width, eps);
    });
  });
}

EXPORT(void quire_decode)(const Model* model, const Rows* rows, const Step* step, int num_threads) {
  with_team(num_threads, [&](Worker& worker) { run_decode(worker, *model, *rows, *step); });
}

// Numbers of `Step.activations`.
EXPORT(int64_t quire_activations)(const Model* model, int num_rows) {
  Activations activations;
  return activations.place(*model, num_rows, nullptr) - (float*)nullptr;
}

// K or V of one head of a sealed page as fp32 [rows, length] of the stored shape, K with its tokens' norms.
EXPORT(void quire_unpack)(const Layer* layer, int64_t page, int head, int is_key, float* tile, uint8_t* scratch) {
  const uint8_t* record = layer->sealed + page * layer->page_bytes;
  Scratch memory;
  memory.place(*layer, (float*)scratch);
  if (is_key)
    unpack_keys(*layer, record, head, memory.tile, memory);
  else
    unpack_tile(*layer, layer->v, record, head, memory.tile, memory);
  __builtin_memcpy(tile, memory.tile, 4 * (size_t)layer->page_tokens * layer->head_dim);
}

EXPORT(void quire_exp2)(const float* x, float* y, int64_t count) {
  for (int64_t n = 0; n < count; ++n) y[n] = exp2_of(x[n]);
}
