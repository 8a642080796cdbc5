// Sums over lanes, taken for a batch of edges at once.
//
// At each step a lane gives away half of its edges and keeps the other half, so that in the end a
// lane has the sums of few edges.
#pragma once
#include "scalar.cuh"

#define ALL_LANES 0xffffffffu

struct Plus {
  template <class T> DEVICE_MEMBER T operator()(T a, T b) const { return a + b; }
};
struct Or {
  DEVICE_MEMBER unsigned operator()(unsigned a, unsigned b) const { return a | b; }
};

// Combines each edge's values over WIDTH lanes of those of a mask, of which the lane is number
// `sub`; the results of a lane's own edges come first. The order is the same for every edge and in
// every pass.
template <int WIDTH, class T, class Add>
DEVICE void combine(T (&values)[BATCH], int sub, Add add, unsigned lanes = ALL_LANES) {
  int count = BATCH;
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2) {
    if (count == 1) {
      values[0] = add(values[0], __shfl_xor_sync(lanes, values[0], offset));
      continue;
    }
    count /= 2;
    const bool upper = sub & offset;
#pragma unroll
    for (int i = 0; i < count; i++) {
      const T given = upper ? values[i] : values[i + count];
      const T kept = upper ? values[i + count] : values[i];
      values[i] = add(kept, __shfl_xor_sync(lanes, given, offset));
    }
  }
}
