// The edges of a row or tile, in batches of BATCH, a power of two.
//
// With LOOPS, edges from a node to itself are skipped, and the self-loop of the row follows its
// last edge. Positions number the edges in the rows by target, and after them the self-loops.
#pragma once
#include "heads.cuh"

#define SHARERS (LANES < BATCH ? LANES : BATCH)  // lanes that load indices for their group
#define LOADS (BATCH / SHARERS)

// 32 bits where the indices have as many: few registers matter more than short code.
#if INDEX == 64
typedef long long position_t;
#else
typedef unsigned position_t;
#endif
#define NOWHERE ((position_t)-1)

struct Graph {
  const index_t *rowptr, *idx;
  const long long* tiles;
  long long num_rows, num_tiles, split, num_loops;

  DEVICE_MEMBER long long num_edges() const { return rowptr[num_rows]; }
};

struct Edges {
  index_t row, part;             // row is -1 where there is nothing to do, part of a whole row
  position_t begin, end;         // of the edges
  position_t stop, loop;         // the end with the self-loop, and the position of that

  DEVICE_MEMBER Edges(const Graph& graph, long long item) {
    Item it;
    if (!find_item(it, item, graph.rowptr, graph.tiles, graph.num_rows, graph.num_tiles,
                   graph.split))
      it.row = it.part = -1, it.begin = it.end = 0;
    row = it.row, begin = it.begin, end = stop = it.end, part = it.part, loop = 0;
#if LOOPS
    if (row >= 0 && row < graph.num_loops && (part < 0 || end == graph.rowptr[row + 1]))
      stop = end + 1, loop = graph.num_edges() + row;
#endif
  }
  DEVICE_MEMBER position_t position(position_t at) const { return LOOPS && at == end ? loop : at; }

  // The same by target, given `perm` in rows by source.
  DEVICE_MEMBER position_t position(const index_t* perm, position_t at) const {
    if (LOOPS && at == end) return loop;
    return perm && at < end ? (position_t)__ldg(perm + at) : at;
  }
  // NOWHERE beyond the last edge, and of an edge that is skipped.
  DEVICE_MEMBER position_t find(const index_t* idx, const index_t* perm, position_t at) const {
    return at < stop && takes(idx, at) ? position(perm, at) : NOWHERE;
  }
  // Whether an edge before the end is not skipped.
  DEVICE_MEMBER bool takes(const index_t* idx, position_t at) const {
    return !LOOPS || at >= end || __ldg(idx + at) != row;
  }
  // The source of an edge, -1 for none.
  DEVICE_MEMBER index_t source(const index_t* idx, position_t at) const {
    index_t found = at < end ? __ldg(idx + at) : -1;
#if LOOPS
    if (found == row) found = -1;
    if (at == end && at < stop) found = row;
#endif
    return found;
  }

  // The lane's share of the sources of a batch: of its own edge, where it has but one.
  DEVICE_MEMBER void fetch(const index_t* idx, position_t k, index_t (&mine)[LOADS]) const {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      mine[i] = source(idx, k + i * SHARERS + threadIdx.x / SPREAD % SHARERS);
  }
};

// Whether a position has a number of a head, and where a table [E + L, H] has it.
DEVICE bool has_number(position_t position, const Place& place, int slot) {
  return position != NOWHERE && place.has(slot);
}
template <class T>
DEVICE T* number_at(T* table, position_t position, const Place& place, int slot) {
  return in_row(table, position, place.heads, place.head_of(slot));
}

// The number of a position and head, zero where there is none.
DEVICE acc_t load_number(const acc_t* table, position_t position, const Place& place, int slot) {
  const acc_t* at = number_at(table, position, place, slot);
  return has_number(position, place, slot) ? __ldg(at) : 0;
}

// Writes the sums of an item: of a whole row to the table, of a tile to its partial.
DEVICE void store_sums(scalar_t* table, acc_t* partial, const Edges& edges, const Place& place,
                       const acc_t (&sums)[NV][VEC]) {
  if (edges.part >= 0)
    store_partial(partial, edges.part, place, sums);
  else
    store_row(table, edges.row, place, sums);
}

// Gives all lanes of a group all sources of a batch; returns a bit for each that is one.
template <bool FULL>
DEVICE unsigned spread(const index_t (&mine)[LOADS], index_t (&source)[BATCH]) {
  unsigned used = 0;
#pragma unroll
  for (int u = 0; u < BATCH; u++) {
    source[u] = mine[u / SHARERS];
    if (LANES > 1)
      source[u] = __shfl_sync(ALL_LANES, source[u], u % SHARERS * SPREAD, LANES);
    used |= (unsigned)(source[u] >= 0) << u;
  }
  return FULL ? ~0u : used;
}

// Whether a batch lacks no edge, for all lanes of a warp.
DEVICE bool full_batch(const Edges& edges, position_t k, const index_t (&mine)[LOADS]) {
#if LOOPS
  bool full = true;
#pragma unroll
  for (int i = 0; i < LOADS; i++) full &= mine[i] >= 0;
  return __all_sync(ALL_LANES, full);
#else
  return all_groups(k + BATCH <= edges.end);
#endif
}

// Calls step.batch<FULL>(k, mine) for each batch of an item's edges, with the next batch's indices
// on their way.
template <class Step> DEVICE void walk(const Edges& edges, const index_t* idx, Step& step) {
  index_t next[LOADS];
  edges.fetch(idx, edges.begin, next);
  for (position_t k = edges.begin; any_group(k < edges.stop); k += BATCH) {
    index_t mine[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) mine[i] = next[i];
    edges.fetch(idx, k + BATCH, next);
    if (full_batch(edges, k, mine))
      step.template batch<true>(k, mine);
    else
      step.template batch<false>(k, mine);
  }
}
