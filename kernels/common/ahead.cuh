// The rows of the next batch of edges, on their way while those of the last one are in use.
//
// Rows of TABLES tables lie in shared memory, twice a batch. Each lane asks for, and reads, its own
// part of a row: nobody waits for anybody else. From sm_80 on the copies take no registers.
#pragma once
#include "edges.cuh"

#ifndef TABLES
#define TABLES 1
#endif

struct Ahead {
  typedef bits_t Memory[2][TABLES][BATCH][NV][THREADS];
  DEVICE_MEMBER static Memory& memory() {
    __shared__ Memory rows;
    return rows;
  }

  // Asks for the rows of a batch; zeros where there is no edge, or no number.
  DEVICE_MEMBER static void ask(const scalar_t* const (&tables)[TABLES], int half,
                                const index_t (&source)[BATCH], const Place& place) {
#pragma unroll
    for (int t = 0; t < TABLES; t++)
#pragma unroll
      for (int u = 0; u < BATCH; u++)
#pragma unroll
        for (int n = 0; n < NV; n++) {
          const bool inside = place.inside(n) && source[u] >= 0;
          const long long at = (long long)source[u] * place.width + place.feature(n);
          copy(memory()[half][t][u][n] + threadIdx.x, tables[t] + (inside ? at : 0), inside);
        }
    commit();
  }

  // Until all rows are there that were asked for before the last time.
  DEVICE_MEMBER static void wait() {
#ifdef ASYNC_COPIES
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
  }

 private:
  DEVICE_MEMBER static void copy(bits_t* to, const scalar_t* from, bool inside) {
#ifdef ASYNC_COPIES
    if (sizeof(bits_t) >= 4) {
      const unsigned address = __cvta_generic_to_shared(to), size = inside ? sizeof(bits_t) : 0;
      if (sizeof(bits_t) == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(size) : "memory");
      else if (sizeof(bits_t) == 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address), "l"(from), "r"(size) : "memory");
      else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(size) : "memory");
      return;
    }
#endif
    *to = inside ? __ldg((const bits_t*)from) : bits_t();
  }
  DEVICE_MEMBER static void commit() {
#ifdef ASYNC_COPIES
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }
};

// The lane's parts of the rows of a batch, in the shared memory of its half.
struct RowsOf {
  int half, table;
  DEVICE_MEMBER Packed operator()(int u, int n) const {
    return {Ahead::memory()[half][table][u][n][threadIdx.x]};
  }
};

// parts[slot][u] += the lane's part of left . rows(u)
DEVICE void add_dots(const acc_t (&left)[NV][VEC], const RowsOf& rows,
                     acc_t (&parts)[SLOTS][BATCH]) {
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      acc_t values[VEC];
      unpack(rows(u, n), values);
#pragma unroll
      for (int v = 0; v < VEC; v++)
        parts[n / HEAD_VECS][u] = fma(left[n][v], values[v], parts[n / HEAD_VECS][u]);
    }
}

// sum += weights[u] * rows(u) over the edges of a batch, each head by its own weights
DEVICE void add_weighted(acc_t (&sum)[NV][VEC], const acc_t (&weights)[SLOTS][BATCH],
                         const RowsOf& rows) {
  read_anew();
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      const acc_t weight = of_edge(weights[s], u);
#pragma unroll
      for (int n = s * HEAD_VECS; n < (s + 1) * HEAD_VECS; n++) {
        acc_t values[VEC];
        unpack(rows(u, n), values);
        add_scaled(sum[n], weight, values);
      }
    }
}

// Calls step.ask(half, source) for each batch of an item's edges, one ahead of
// step.batch<FULL>(k, used, half); used has a bit for each edge of the batch.
template <class Step>
DEVICE void walk_ahead(const Edges& edges, const index_t* idx, Step& step) {
  index_t mine[LOADS], source[BATCH];
  edges.fetch(idx, edges.begin, mine);
  unsigned next = spread(mine, source);
  step.ask(0, source);
  edges.fetch(idx, edges.begin + BATCH, mine);
  int half = 0;
  for (position_t k = edges.begin; any_group(k < edges.stop); k += BATCH, half ^= 1) {
    const unsigned used = next;
    next = spread(mine, source);
    step.ask(half ^ 1, source);
    edges.fetch(idx, k + 2 * BATCH, mine);
    Ahead::wait();
    if (!LOOPS && all_groups(k + BATCH <= edges.end))
      step.template batch<true>(k, used, half);
    else
      step.template batch<false>(k, used, half);
  }
}
