// What Python hands over. kernels/cpu/structs.py has the same fields; `quire_struct_bytes` tells them apart.
#pragma once
#include <stdint.h>

enum Code : int32_t { FP32, BF16, FP16, INT8, INT4, INT3, INT2, E4M3, E5M2 };
enum Parameters : int32_t { UNIT, HALF, BYTE };          // how scales are kept; UNIT: there are none
enum Zero : int32_t { NO_ZERO, STORED, CENTRED };        // CENTRED: -zero_unit scales

// K or V of one layer in a page record. Offsets are bytes from the record's begin; the first axis is the KV head.
struct Store {
  int64_t codes, scale, zero, factor;
  int32_t code;
  int32_t parameters;
  int32_t zero_kind;
  int32_t group_tokens, group_channels;
  int32_t folds;       // whether parameters go into the other operand: K's are per channel, V's per token
  float zero_unit;     // of a stored zero in 8 bits: what it counts, in scales
  int32_t num_values;  // of a table that codes are places in; 0: none
  const float* values;
};

struct Layer {
  Store k, v;
  int64_t norm;  // offset of the tokens' norms, -1: none
  const uint8_t* sealed;
  const uint8_t* open;  // this layer of slot 0: K [heads, P, D], then V
  int64_t page_bytes, slot_bytes;
  int32_t slot_code;
  int32_t num_kv_heads, group, page_tokens, head_dim;
};

// A product with weights [blocks, num_inputs, `quire_linear_block`]: a block has that many outputs, the last one with
// zeros behind them. `code`: FP32, BF16 or FP16. `bias` may be absent.
struct Linear {
  const uint8_t* weights;
  const float* bias;
  int64_t num_inputs, num_outputs;
  int32_t code;
};

// `Turn` of kernels/row_ops.py.
struct Heads {
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t is_rotated, stores_before_rope;
};

// The weights of norms are fp32; `qk_norm` and `qk_balance` [heads + kv_heads, D] may be absent.
struct DecoderLayer {
  const float *input_norm, *post_norm, *qk_norm, *qk_balance;
  Linear qkv, output, gate_up, down;
  Layer pages;
  Heads heads;
};

// All layers have as many heads.
struct Model {
  const DecoderLayer* layers;
  const float* norm;
  Linear head;
  int32_t num_layers, hidden_size, intermediate_size;
  float eps;
};

// Decode rows. A row's pages are `entries[first_entry[row]]` to those of the next row: the id of a sealed page, or -1 -
// id of a slot; the last is its own, of which it sees `own_tokens[row]`. A split is up to `split_pages` of them in
// order; `split_row` [num_splits], `first_split` [num_rows + 1].
struct Rows {
  const int64_t* entries;
  const int32_t *first_entry, *own_tokens, *first_split, *split_row;
  int32_t num_rows, num_splits, split_pages;
  int32_t is_observed;  // whether `shares` is wanted
};

// fp32. `q`, `out`: [num_rows, heads, D]. `parts`: [num_splits, heads, D + 2]. `shares`: [entries, heads, 2]: what each
// page got of its row's weights; the second number is only used within the call.
// `scratch`: `scratch_bytes` for each thread, zeros at first (`quire_scratch_bytes`).
struct Buffers {
  const float* q;
  float *out, *parts, *shares;
  uint8_t* scratch;
  int64_t scratch_bytes;
};

// A prefill chunk, fp32. `q`, `out` [num_rows, heads, D]; `k`, `v` [num_rows, kv_heads, D], rounded to what slots keep.
// `entries`: as in Rows, the pages before the chunk and then its own. `scratch`: `scratch_bytes` for each thread, zeros
// at first (`quire_chunk_scratch_bytes`).
struct Chunk {
  const int64_t* entries;
  const float *q, *k, *v;
  float* out;
  uint8_t* scratch;
  int64_t scratch_bytes;
  int32_t num_context, num_rows;
};

// Of `quire_decode`, fp32. `hidden` [num_rows, hidden]; `cos`, `sin` [num_rows, D / 2]; `logits` [num_rows, vocab];
// `parts` and `scratch`: as in Buffers.
struct Step {
  float* hidden;
  const float *cos, *sin;
  float *logits, *activations, *parts;
  uint8_t* scratch;
  int64_t scratch_bytes;
};
