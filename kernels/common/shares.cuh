// Who shares the gradient of an extremum, and how each share is laid down.
//
// For the features [first, first + 32 * words) of every edge k of the rows by target, bit f % 32 of
// hits[k * words + f / 32] tells whether the edge shares in the gradient of row i at feature f. What
// it gets is grad[i, f], or share[i, f] where edges of the row tie at any feature. TIES says who
// shares: 0 "even", every edge that attains the result, and the buffer of zeros that scatter_reduce
// starts from as one more where the result is zero; 1 "first", the first edge; 2 "exact", every edge
// that attains the result.
//
// Under "even" stock multiplies by the share where an edge attains the result and by zero where it
// does not, so a share that is not finite reaches all edges of a row: then all their bits are set,
// and `part_of` finds out which edges attain the result.
#pragma once
#include "scalar.cuh"

#define EVEN 0
#define FIRST 1

DEVICE bool is_finite(acc_t value) { return value - value == 0; }

DEVICE bool attains(acc_t v, acc_t best) {
  return v == best || (TIES != EVEN && v != v && best != best);
}

// What the edges of each row get.
struct Shares {
  const scalar_t *grad, *share;
  const unsigned char* tied;  // of each row, whether edges tie

  DEVICE_MEMBER const scalar_t* of(long long row, int width) const {
    return (TIES != FIRST && __ldg(tied + row) ? share : grad) + row * width;
  }
};
