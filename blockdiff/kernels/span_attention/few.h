/* Attention of few rows: vectors run along a head's numbers, or keys, instead of rows.

   Up to FEW rows are computed together in passes of 4, 2 or 1; scores are stored as [rows, keys]. */

#include "blocks.h"

#define FEW 8
#define AHEAD 192             /* keys at a time */
#define REACH (AHEAD + WIDTH) /* stride between the scores of rows */

/* Sum each of WIDTH vectors: lane l of the result is the sum of line l. The lines are overwritten. */
#define HALVE(step)                                                                                                   \
    if (step < WIDTH) EACH(i, WIDTH) if (!(i & (2 * step - 1))) {                                                     \
        Vector a = line[i], b = line[i | step];                                                                       \
        line[i] = SHUFFLE(a, b, ALL(LOW, step)) + SHUFFLE(a, b, ALL(HIGH, step));                                     \
    }
INLINE Vector sums_of(Vector *line) {
    HALVE(1)
    HALVE(2)
    HALVE(4)
    HALVE(8)
    return line[0];
}

/* Scores of R rows of q with the keys, as many at a time as fill a vector. The last ones make some again, to stay
   inside, and fewer keys than that are taken one by one, each as if it stood there N times. */
#define DOTS(R)                                                                                                       \
    static void dots_##R(const float *q, const float *k, int64_t line, int64_t keys, int64_t dim, float *scores) {    \
        enum { N = WIDTH / R };                                                                                       \
        for (int64_t n = 0; n < keys; n += keys < N ? 1 : N) {                                                        \
            int64_t at = keys < N ? n : MIN(n, keys - N), by = keys < N ? 0 : line;                                   \
            const float *from = k + at * line;                                                                        \
            Vector sums[2 * WIDTH]; /* the second half only silences the compiler */                                 \
            EACH(i, WIDTH) sums[i] = (Vector){0};                                                                     \
            for (int64_t x = 0; x < dim; x += WIDTH) {                                                                \
                Vector row[R];                                                                                        \
                EACH(r, R) row[r] = *(const Loose *)(q + r * dim + x);                                                \
                EACH(i, N) {                                                                                          \
                    Vector key = *(const Loose *)(from + i * by + x);                                                 \
                    EACH(r, R) sums[r * N + i] += row[r] * key;                                                       \
                }                                                                                                     \
            }                                                                                                         \
            Vector all = sums_of(sums);                                                                               \
            EACH(r, R) memcpy(scores + r * REACH + at, (float *)&all + r * N, N * sizeof *scores);                    \
        }                                                                                                             \
    }
DOTS(1)
DOTS(2)
DOTS(4)

/* Turn the scores of a row into weights relative to its highest score so far; return the correction factor of earlier
   weights. */
static float weigh_row(float *scores, int64_t keys, float *peak, float *sum) {
    float high = *peak, total = 0;
#pragma omp simd reduction(max : high)
    for (int64_t i = 0; i < keys; i++) high = scores[i] > high ? scores[i] : high;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < keys; i++) {
        float x = exp_of(scores[i] - high);
        scores[i] = x;
        total += x;
    }
    float factor = exp_of(*peak - high);
    *sum = *sum * factor + total, *peak = high;
    return factor;
}

/* Mask the scores of keys [n, n + keys) that row r does not see. */
static void hide_row(const Lanes *lanes, int64_t r, int source, int64_t n, int64_t keys, float *scores) {
    if (n >= lanes->all_begin[source] && n + keys <= lanes->all_end[source]) return;
    uint32_t lo = lanes->lo[source][r], size = lanes->size[source][r];
#pragma omp simd
    for (int64_t i = 0; i < keys; i++) scores[i] = (uint32_t)(n + i) - lo < size ? scores[i] : -INFINITY;
}

TILE(1, 4)
TILE(2, 1)
TILE(2, 2)
TILE(2, 4)
TILE(4, 1)
TILE(4, 2)
#if IS_ROOMY
TILE(4, 4)
#endif

#define SUM(R, W)                                                                                                     \
    for (; dim - x >= W * WIDTH; x += W * WIDTH)                                                                      \
    tile_##R##_##W(weights, REACH, 1, v + x, line, keys, made + x, dim, R, adds)

/* Set made [R, dim] to weights [R, keys] v, or add it. */
static void sum_1(const float *weights, const float *v, int64_t line, int64_t keys, float *made, int64_t dim, int adds) {
    int64_t x = 0;
    SUM(1, 4);
    SUM(1, 2);
    SUM(1, 1);
}
static void sum_2(const float *weights, const float *v, int64_t line, int64_t keys, float *made, int64_t dim, int adds) {
    int64_t x = 0;
    SUM(2, 4);
    SUM(2, 2);
    SUM(2, 1);
}
static void sum_4(const float *weights, const float *v, int64_t line, int64_t keys, float *made, int64_t dim, int adds) {
    int64_t x = 0;
#if IS_ROOMY
    SUM(4, 4);
#endif
    SUM(4, 2);
    SUM(4, 1);
}

/* Write a block's output, `made` [rows, dim] divided by the sums of its weights; is_empty: its rows see nothing. */
static void write_out(const Call *call, Block block, int64_t head, int is_empty, const float *made, const float *peak,
                      const float *sum, float *out, float *lse) {
    int64_t dim = call->shape->dim;
    for (int64_t r = 0; r < block.rows; r++) {
        int64_t to = line_of(call->shape, block, head, r);
        float one = 1.0f / sum[r];
        if (is_empty) memset(out + to * dim, 0, dim * sizeof *out);
        else
            for (int64_t x = 0; x < dim; x++) out[to * dim + x] = made[r * dim + x] * one;
        if (lse) lse[to] = is_empty ? -INFINITY : peak[r] + logf(sum[r]);
    }
}

/* attend_block for a block of up to FEW rows. */
static void attend_few(const Call *call, Block block, int64_t head, float *out, float *lse) {
    const Shape *s = call->shape;
    int64_t dim = s->dim;
    float q[FEW * dim] __attribute__((aligned(64))), made[FEW * dim] __attribute__((aligned(64)));
    float scores[FEW * REACH] __attribute__((aligned(64)));
    float peak[FEW], sum[FEW] = {0};
    Lanes lanes;
    look(call, block, head, &lanes);
    for (int64_t r = 0; r < FEW; r++) {
        const float *at = r < block.rows ? lanes.at[r] : zeros;
        for (int64_t x = 0; x < dim; x++) q[r * dim + x] = at[x] * call->scale;
        peak[r] = NEVER;
    }
    int is_first = 1;
    for (int i = 0; i < 2; i++) {
        int64_t line = s->of[i].token, base = block.batch * s->of[i].batch + head * s->of[i].head;
        for (int64_t n = lanes.begin[i], keys; n < lanes.end[i]; n += keys, is_first = 0) {
            keys = MIN(AHEAD, lanes.end[i] - n);
            const float *k = call->k[i] + base + n * line, *v = call->v[i] + base + n * line;
            for (int64_t r = 0, left; (left = block.rows - r) > 0; r += 4)
                (left > 2 ? dots_4 : left == 2 ? dots_2 : dots_1)(q + r * dim, k, line, keys, dim, scores + r * REACH);
            for (int64_t r = 0; r < block.rows; r++) {
                hide_row(&lanes, r, i, n, keys, scores + r * REACH);
                float factor = weigh_row(scores + r * REACH, keys, peak + r, sum + r);
                if (factor != 1 && !is_first)
                    for (int64_t x = 0; x < dim; x++) made[r * dim + x] *= factor;
            }
            for (int64_t r = 0, left; (left = block.rows - r) > 0; r += 4)
                (left > 2 ? sum_4 : left == 2 ? sum_2 : sum_1)(scores + r * REACH, v, line, keys, made + r * dim, dim,
                                                               !is_first);
        }
    }
    write_out(call, block, head, is_first, made, peak, sum, out, lse);
}
