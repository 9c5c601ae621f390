// Attention of decode rows over pages.
#pragma once
#include "pages.h"
#include "threads.h"

namespace {

struct Work {
  const Layer& layer;
  const Rows& rows;
  const Buffers& buffers;

  int num_heads() const { return layer.num_kv_heads * layer.group; }
  size_t part_floats() const { return layer.head_dim + 2; }
};

// G queries of one KV head from `first_head` on over the pages of a split: softmax over all of them, relative to the
// largest logit. Leaves sums, the largest logit, in powers of 2, and the total weight.
template <int G>
void attend_split(Work& work, int split, int kv_head, int first_head, const Scratch& scratch) {
  const Layer& layer = work.layer;
  const Rows& rows = work.rows;
  const int row = rows.split_row[split], channels = layer.head_dim, num_heads = work.num_heads();
  const int first = rows.first_entry[row] + (split - rows.first_split[row]) * rows.split_pages;
  const int row_end = rows.first_entry[row + 1];
  const int num_pages = row_end - first < rows.split_pages ? row_end - first : rows.split_pages;
  const float scale = 1.44269504088896341f / __builtin_sqrtf(channels);
  const float* queries = work.buffers.q + ((size_t)row * num_heads + first_head) * channels;
  for (int g = 0; g < G; ++g)
    for (int n = 0; n < (int)scratch.channels; ++n) {
      scratch.queries[g * scratch.channels + n] = n < channels ? queries[g * channels + n] * scale : 0.0f;
      scratch.sums[g * scratch.channels + n] = 0.0f;
    }
  Page pages[MOST_PAGES];
  for (int n = 0; n < num_pages; ++n) {
    const bool is_own = first + n == row_end - 1;
    pages[n] = page_at(layer, rows.entries[first + n], is_own ? rows.own_tokens[row] : layer.page_tokens);
  }
  size_t num_tokens = 0;
  for (int n = 0; n < num_pages; ++n) {
    const Page* next = n + 1 < num_pages ? &pages[n + 1] : nullptr;
    add_logits<G>(layer, pages[n], next, kv_head, scratch.weights + n * layer.page_tokens, scratch);
    num_tokens += pages[n].num_tokens;
  }
  float largest[G];
  for (int g = 0; g < G; ++g) largest[g] = weigh(scratch.weights + g * scratch.tokens, num_tokens, scratch.tokens);
  const uint8_t* records[MOST_PAGES];
  const float* record_weights[MOST_PAGES];
  int num_records = 0;
  float totals[G] = {};
  for (int n = 0; n < num_pages; ++n) {
    const float* weights = scratch.weights + n * layer.page_tokens;
    for (int g = 0; g < G; ++g) {
      Floats sum = splat(0.0f);
      for (int t = 0; t < pages[n].num_tokens; t += LANES) sum += load(weights + g * scratch.tokens + t);
      const float total = sum_of(sum);
      totals[g] += total;
      if (!rows.is_observed) continue;
      float* share = work.buffers.shares + ((size_t)(first + n) * num_heads + first_head + g) * 2;
      share[0] = total, share[1] = largest[g];
    }
    if (!pages[n].is_sealed) {
      const uint8_t* values = slot_half(layer, pages[n], kv_head, false).bytes;
      add_raw_values<G>(layer.slot_code, values, layer, pages[n].num_tokens, weights, scratch);
    } else if (is_raw(layer.v)) {
      const Shape shape = shape_of(layer, layer.v);
      const uint8_t* values = codes_of(layer.v, pages[n].bytes, kv_head, shape);
      add_raw_values<G>(layer.v.code, values, layer, shape.rows, weights, scratch);
    } else {
      records[num_records] = pages[n].bytes, record_weights[num_records++] = weights;
    }
  }
  if (num_records) add_values<G>(layer, records, record_weights, num_records, kv_head, scratch);
  for (int g = 0; g < G; ++g) {
    float* part = work.buffers.parts + ((size_t)split * num_heads + first_head + g) * work.part_floats();
    __builtin_memcpy(part, scratch.sums + g * scratch.channels, 4 * channels);
    part[channels] = largest[g], part[channels + 1] = totals[g];
  }
}

void attend_heads(Work& work, int split, int kv_head, const Scratch& scratch) {
  const int end = (kv_head + 1) * work.layer.group;
  for (int head = kv_head * work.layer.group; head < end;) switch (end - head) {
      case 1: attend_split<1>(work, split, kv_head, head, scratch), head += 1; break;
      case 2: attend_split<2>(work, split, kv_head, head, scratch), head += 2; break;
      case 3: case 5: case 6: attend_split<3>(work, split, kv_head, head, scratch), head += 3; break;
      default: attend_split<4>(work, split, kv_head, head, scratch), head += 4;
    }
}

// A row's splits in their order, whoever computed them.
void combine(Work& work, int row) {
  const Rows& rows = work.rows;
  const int channels = work.layer.head_dim, num_heads = work.num_heads();
  for (int head = 0; head < num_heads; ++head) {
    const size_t stride = num_heads * work.part_floats();
    const float* parts = work.buffers.parts + rows.first_split[row] * stride + head * work.part_floats();
    const int count = rows.first_split[row + 1] - rows.first_split[row];
    float largest = parts[channels], total = 0.0f;
    for (int n = 1; n < count; ++n)
      if (parts[n * stride + channels] > largest) largest = parts[n * stride + channels];
    float* out = work.buffers.out + ((size_t)row * num_heads + head) * channels;
    for (int c = 0; c < channels; ++c) out[c] = 0.0f;
    for (int n = 0; n < count; ++n) {
      const float* part = parts + n * stride;
      const float weight = exp2_of(part[channels] - largest);
      total += weight * part[channels + 1];
      for (int c = 0; c < channels; ++c) out[c] += weight * part[c];
    }
    for (int c = 0; c < channels; ++c) out[c] /= total;
    for (int entry = rows.first_entry[row]; rows.is_observed && entry < rows.first_entry[row + 1]; ++entry) {
      float* share = work.buffers.shares + ((size_t)entry * num_heads + head) * 2;
      share[0] = share[0] * exp2_of(share[1] - largest) / total;
    }
  }
}

inline void attend_rows(Worker& worker, const Layer& layer, const Rows& rows, const Buffers& buffers) {
  Work work = {layer, rows, buffers};
  Scratch scratch;
  scratch.place(layer, (float*)(buffers.scratch + worker.thread * buffers.scratch_bytes));
  const int num_kv_heads = layer.num_kv_heads;
  // the heads of a page are neighbours in memory, so one thread takes all of them if there is enough for the others
  const bool is_plenty = rows.num_splits >= 4 * worker.num_threads;
  worker.share(rows.num_splits * num_kv_heads, is_plenty ? num_kv_heads : 1,
               [&](int n) { attend_heads(work, n / num_kv_heads, n % num_kv_heads, scratch); });
  worker.share(rows.num_rows, 1, [&](int row) { combine(work, row); });
}

}  // namespace
