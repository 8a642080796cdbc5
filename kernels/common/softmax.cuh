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
