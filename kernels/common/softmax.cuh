// Softmax over a row's edges in one walk, and over the tiles of a row.
//
// `stats` hold the largest score and, of whole rows, one over the sum of exponentials; of tiles
// that sum, or one if there are edges whose scores are all -inf.
#pragma once
#include "heads.cuh"

// One over the sum of exponentials; NaN where all scores are -inf.
DEVICE acc_t inverse_of(acc_t top, acc_t total) {
  return top > -INF ? 1 / total : total * (INF - INF);
}

// What exponentials that were taken of the difference to `from` are multiplied by.
DEVICE acc_t change_of(acc_t from, acc_t to) { return from == to ? 1 : exp(from - to); }

struct Softmax {
  acc_t top, total;  // the largest score so far; the sum over the lane's own edges

  DEVICE_MEMBER void clear() { top = -INF, total = 0; }

  // Turns the scores of the lane's edges into terms of sums; returns the factor of those so far.
  DEVICE_MEMBER acc_t add(acc_t (&scores)[BATCH]) {
    acc_t best = scores[0];
#pragma unroll
    for (int i = 1; i < OWN; i++) best = max(best, scores[i]);
    best = max(top, max_over_edges(best));
    const acc_t change = change_of(top, best), shift = best > -INF ? best : 0;
    top = best, total *= change;
#pragma unroll
    for (int i = 0; i < OWN; i++) scores[i] = exp(scores[i] - shift), total += scores[i];
    return change;
  }
};

struct AttentionTables {
  const acc_t *partial, *partial_stats;
  scalar_t* out;
  acc_t* stats;  // may be null
  int heads, channels;
};

struct AttentionSum {
  acc_t values[VEC], top, total;
  DEVICE_MEMBER AttentionSum() {}
  DEVICE_MEMBER AttentionSum(const AttentionTables& t, long long part, int f) {
    const long long at = part * 2 * t.heads + f / t.channels;
    top = t.partial_stats[at], total = t.partial_stats[at + t.heads];
#pragma unroll
    for (int v = 0; v < VEC; v++) values[v] = t.partial[part * t.heads * t.channels + f + v];
  }
  DEVICE_MEMBER void add(const AttentionSum& other) {
    const acc_t best = max(top, other.top);
    const acc_t mine = change_of(top, best), theirs = change_of(other.top, best);
    top = best, total = total * mine + other.total * theirs;
#pragma unroll
    for (int v = 0; v < VEC; v++) values[v] = values[v] * mine + other.values[v] * theirs;
  }
  DEVICE_MEMBER void finish(const AttentionTables& t, long long row, int f) {
    const bool none = top == -INF && total == 0;
    const acc_t inverse = none ? 0 : inverse_of(top, total);
#pragma unroll
    for (int v = 0; v < VEC; v++) values[v] *= inverse;
    store(t.out + row * t.heads * t.channels + f, values);
    if (t.stats == nullptr || f % t.channels) return;
    acc_t* stats = t.stats + row * 2 * t.heads + f / t.channels;
    stats[0] = none ? 0 : top, stats[t.heads] = inverse;
  }
};
