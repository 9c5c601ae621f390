// A whole step of decode rows: all layers of a model, with pages written and attended to on the way.
#pragma once
#include "attend.h"
#include "linear.h"
#include "row_ops.h"

namespace {

inline uint16_t bf16_of(float x) {
  const uint32_t bits = bits_of<uint32_t>(x);
  return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}

// fp32 memory of a step, [rows] of each.
struct Activations {
  float *x, *qkv, *q, *kv, *mixed, *delta, *gates, *gated;

  // Places all of it from `memory` on, and says where it ends.
  float* place(const Model& model, size_t num_rows, float* memory) {
    const Heads& heads = model.layers[0].heads;
    const size_t q_width = (size_t)heads.num_heads * heads.head_dim, kv_width = 2 * heads.num_kv_heads * heads.head_dim;
    float* end = memory;
    const auto take = [&](size_t width) { return (end += num_rows * width) - num_rows * width; };
    x = take(model.hidden_size), delta = take(model.hidden_size);
    qkv = take(q_width + kv_width), q = take(q_width), kv = take(kv_width), mixed = take(q_width);
    gates = take(2 * model.intermediate_size), gated = take(model.intermediate_size);
    return end;
  }
};

// K and V of a row's token to its own page.
inline void append(const Layer& layer, const Rows& rows, int row, const float* kv) {
  const size_t size = layer.head_dim, place = rows.own_tokens[row] - 1;
  const int64_t slot = -1 - rows.entries[rows.first_entry[row + 1] - 1];
  uint8_t* page = (uint8_t*)layer.open + slot * layer.slot_bytes;
  for (int head = 0; head < 2 * layer.num_kv_heads; ++head) {
    const float* from = kv + head * size;
    const size_t first = (head * layer.page_tokens + place) * size;
    if (layer.slot_code == FP32)
      __builtin_memcpy(page + 4 * first, from, 4 * size);
    else
      for (size_t n = 0; n < size; ++n) ((uint16_t*)page)[first + n] = bf16_of(from[n]);
  }
}

// `step.hidden` becomes the residual stream behind the last layer.
inline void run_decode(Worker& worker, const Model& model, const Rows& rows, const Step& step) {
  const Heads& heads = model.layers[0].heads;
  const int num_rows = rows.num_rows;
  const int64_t width = model.hidden_size, q_width = (int64_t)heads.num_heads * heads.head_dim;
  const int64_t kv_width = 2 * heads.num_kv_heads * heads.head_dim, half = heads.head_dim / 2;
  Activations a;
  a.place(model, num_rows, step.activations);
  const auto normalise = [&](const float* delta, const float* weight) {
    normalise_rows(worker, step.hidden, delta, weight, step.hidden, a.x, num_rows, width, model.eps);
  };
  normalise(nullptr, model.layers[0].input_norm);
  for (int index = 0; index < model.num_layers; ++index) {
    const DecoderLayer& layer = model.layers[index];
    multiply(worker, layer.qkv, a.x, a.qkv, num_rows);
    share_rows(worker, num_rows, [&](int row) {
      float* kv = a.kv + row * kv_width;
      turn(layer.heads, a.qkv + row * (q_width + kv_width), step.cos + row * half, step.sin + row * half, layer.qk_norm,
           layer.qk_balance, a.q + row * q_width, kv, model.eps);
      append(layer.pages, rows, row, kv);
    });
    attend_rows(worker, layer.pages, rows, {a.q, a.mixed, step.parts, nullptr, step.scratch, step.scratch_bytes});
    multiply(worker, layer.output, a.mixed, a.delta, num_rows);
    normalise(a.delta, layer.post_norm);
    multiply(worker, layer.gate_up, a.x, a.gates, num_rows);
    gate_rows(worker, a.gates, a.gated, num_rows, model.intermediate_size);
    multiply(worker, layer.down, a.gated, a.delta, num_rows);
    normalise(a.delta, index + 1 < model.num_layers ? model.layers[index + 1].input_norm : model.norm);
  }
  multiply(worker, model.head, a.x, step.logits, num_rows);
}

}  // namespace
