/* The cut of attention over two spans of keys per query into blocks, for forward.c and backward.c.

   A row is one query of one head. Consecutive rows of a kv head are computed as lanes of vectors, at most LANES, against
   KEYS keys at a time; scores are stored as [keys, lanes]. Neighbouring queries share a block if their spans overlap, so
   each key that a block reads is visible to one of its queries. */

#include "products.h"

#define KEYS 96
#define SPARE 16        /* lines after the keys, and lanes after the rows, that products read but do not use */
#define NEVER (-1e30f)  /* below any score */
#define LARGEST 512     /* largest size of a head */

/* Sizes, and strides in numbers; the caller fills it in as an array of int64. */
typedef struct {
    int64_t batch, queries, kv_heads, group, dim, chunks;
    int64_t q_batch, q_token, q_head, bounds_batch, bounds_query;
    struct {
        int64_t tokens, batch, token, head, grad_tokens;
    } of[2]; /* the prefix and the call's own tokens */
} Shape;

/* Rows [first, first + rows) of a batch element, counted as query * group + head. */
typedef struct {
    int32_t batch, first, rows;
} Block;

/* The range of keys of a task's gradient. */
typedef struct {
    int64_t begin[2], end[2];
} Hull;

/* In the caller's memory: batch + 1 numbers for `begin`, four for the hull of each task of a backward, and two for each
   block. There are at most queries times (rows of a query / LANES, rounded up) blocks. */
typedef struct {
    int64_t *begin; /* the first block of each batch element */
    Hull *hulls;
    Block *blocks;
} Plan;

typedef struct {
    const Shape *shape;
    const float *q, *k[2], *v[2];
    const int32_t *bounds;
    float scale;
} Call;

/* The keys that the lanes of a block see, [lo, lo + size) of both sources: their union, and those common to all. */
typedef struct {
    int64_t width; /* lanes in use, whole vectors */
    int32_t lo[2][LANES], size[2][LANES];
    int64_t begin[2], end[2], all_begin[2], all_end[2];
    const float *at[LANES]; /* the rows of queries */
} Lanes;

static const float zeros[LARGEST];

static inline void spans_of(const Call *call, int64_t b, int64_t t, int64_t lo[2], int64_t hi[2]) {
    const Shape *s = call->shape;
    const int32_t *bounds = call->bounds ? call->bounds + b * s->bounds_batch + t * s->bounds_query : NULL;
    for (int i = 0; i < 2; i++) {
        lo[i] = bounds ? MAX(bounds[2 * i], 0) : 0;
        hi[i] = bounds ? MIN(bounds[2 * i + 1], s->of[i].tokens) : s->of[i].tokens;
        if (hi[i] <= lo[i]) lo[i] = hi[i] = 0;
    }
}

static Plan planned(const Call *call, int64_t *room) {
    const Shape *s = call->shape;
    int64_t *hulls = room + s->batch + 1, *blocks = hulls + 4 * s->batch * s->kv_heads * s->chunks, n = 0;
    Plan plan = {room, (Hull *)hulls, (Block *)blocks};
    for (int64_t b = 0; b < s->batch; b++) {
        plan.begin[b] = n;
        for (int64_t t = 0, end; t < s->queries; t = end) {
            int64_t lo[2], hi[2], next_lo[2], next_hi[2];
            spans_of(call, b, t, lo, hi);
            for (end = call->bounds ? t + 1 : s->queries; end < s->queries; end++) {
                spans_of(call, b, end, next_lo, next_hi);
                int is_one = 1;
                for (int i = 0; i < 2; i++) {
                    int is_empty = lo[i] == hi[i] && next_lo[i] == next_hi[i];
                    is_one &= is_empty || (lo[i] < next_hi[i] && next_lo[i] < hi[i]);
                    lo[i] = next_lo[i], hi[i] = next_hi[i];
                }
                if (!is_one) break;
            }
            for (int64_t row = t * s->group; row < end * s->group; row += LANES)
                plan.blocks[n++] = (Block){b, row, MIN(end * s->group - row, LANES)};
        }
    }
    plan.begin[s->batch] = n;
    return plan;
}

static inline int64_t row_of_q(const Shape *s, Block block, int64_t head, int64_t i) {
    int64_t row = block.first + i;
    return block.batch * s->q_batch + row / s->group * s->q_token + (head * s->group + row % s->group) * s->q_head;
}

/* row_of_q in this code's own layout: [batch, queries, heads] lines. */
static inline int64_t line_of(const Shape *s, Block block, int64_t head, int64_t i) {
    int64_t row = block.first + i;
    return ((block.batch * s->queries + row / s->group) * s->kv_heads + head) * s->group + row % s->group;
}

static void look(const Call *call, Block block, int64_t head, Lanes *lanes) {
    const Shape *s = call->shape;
    memset(lanes->size, 0, sizeof lanes->size);
    memset(lanes->lo, 0, sizeof lanes->lo);
    lanes->width = (block.rows + WIDTH - 1) / WIDTH * WIDTH;
    for (int i = 0; i < 2; i++) {
        lanes->begin[i] = lanes->all_end[i] = INT32_MAX;
        lanes->end[i] = lanes->all_begin[i] = 0;
    }
    for (int64_t r = 0; r < block.rows; r++) {
        int64_t lo[2], hi[2];
        spans_of(call, block.batch, (block.first + r) / s->group, lo, hi);
        for (int i = 0; i < 2; i++) {
            lanes->lo[i][r] = lo[i], lanes->size[i][r] = hi[i] - lo[i];
            lanes->all_begin[i] = MAX(lanes->all_begin[i], lo[i]);
            lanes->all_end[i] = MIN(lanes->all_end[i], hi[i]);
            lanes->begin[i] = MIN(lanes->begin[i], lo[i]);
            lanes->end[i] = MAX(lanes->end[i], hi[i]);
        }
        lanes->at[r] = call->q + row_of_q(s, block, head, r);
    }
    for (int64_t r = block.rows; r < lanes->width; r++) lanes->at[r] = zeros;
}

/* Mask the scores of keys [n, n + keys) in lanes that do not see them. */
static void hide(const Lanes *lanes, int source, int64_t n, int64_t keys, float *scores) {
    if (n >= lanes->all_begin[source] && n + keys <= lanes->all_end[source]) return;
    const int32_t *lo = lanes->lo[source], *size = lanes->size[source];
    for (int64_t i = 0; i < keys; i++) {
        float *x = scores + i * LANES;
#pragma omp simd
        for (int64_t l = 0; l < lanes->width; l++)
            x[l] = (uint32_t)(n + i - lo[l]) < (uint32_t)size[l] ? x[l] : -INFINITY;
    }
}

/* Products read a few lanes and lines beyond the data: clear them, since denormal numbers would be slow. */
static void clear_spare(float *x, int64_t keys, int64_t width) {
    if (width < LANES)
        for (int64_t i = 0; i < keys; i++) memset(x + i * LANES + width, 0, MIN(SPARE, LANES - width) * sizeof *x);
    memset(x + keys * LANES, 0, SPARE * LANES * sizeof *x);
}
