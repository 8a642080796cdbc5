// Dropout of attention weights: the masks of pyg_ioaware/philox.py, drawn where they are used.
#pragma once
#include "scalar.cuh"

struct Dropout {
  const long long* seed;
  long long threshold;  // words below it are dropped
  acc_t keep;           // the factor of the others

  // The factor of the weight at a position and head: zero, or `keep`.
  DEVICE_MEMBER acc_t factor(long long position, int head) const {
    unsigned c0 = position, c1 = (unsigned long long)position >> 32, c2 = head / 4, c3 = 0;
    unsigned k0 = *seed, k1 = (unsigned long long)*seed >> 32;
#pragma unroll
    for (int round = 0; round < 10; round++) {
      const unsigned high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
      const unsigned high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
      c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const unsigned word = head % 4 == 0 ? c0 : head % 4 == 1 ? c1 : head % 4 == 2 ? c2 : c3;
    return word >= threshold ? keep : 0;
  }
};
