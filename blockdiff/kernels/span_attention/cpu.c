/* Attention over two spans of keys per query: only what is seen is computed, and no score is kept. */

#include "blocks.h"

/* Scores become weights relative to the highest score so far; factor: what earlier weights are to be multiplied by. */
static int weigh(float *scores, int64_t keys, int64_t width, float *peak, float *sum, float *factor) {
    int is_higher = 0;
    for (int64_t i = keys; i % 4; i++)
        for (int64_t l = 0; l < width; l++) scores[i * LANES + l] = NEVER;
#pragma omp simd reduction(| : is_higher)
    for (int64_t l = 0; l < width; l++) {
        float high = peak[l], highs[4] = {high, high, high, high}; /* four, for one would wait for itself */
        for (int64_t i = 0; i < keys; i += 4) {
            const float *x = scores + i * LANES + l;
            EACH(n, 4) highs[n] = highs[n] > x[n * LANES] ? highs[n] : x[n * LANES];
        }
        EACH(n, 4) high = high > highs[n] ? high : highs[n];
        is_higher |= high > peak[l];
        factor[l] = exp_of(peak[l] - high);
        peak[l] = high;
    }
#pragma omp simd
    for (int64_t l = 0; l < width; l++) {
        float total = 0, high = peak[l];
        for (int64_t i = 0; i < keys; i++) {
            float x = exp_of(scores[i * LANES + l] - high);
            scores[i * LANES + l] = x;
            total += x;
        }
        sum[l] = sum[l] * factor[l] + total;
    }
    return is_higher;
}

static void attend_block(const Call *call, Block block, int64_t head, float *out, float *lse) {
    const Shape *s = call->shape;
    int64_t dim = s->dim;
    float across[dim * LANES] __attribute__((aligned(64))), made[LANES * dim] __attribute__((aligned(64)));
    float scores[(KEYS + SPARE) * LANES] __attribute__((aligned(64)));
    float peak[LANES], sum[LANES] = {0}, factor[LANES];
    Lanes lanes;
    look(call, block, head, &lanes);
    transpose_rows(lanes.at, lanes.width, dim, call->scale, across);
    for (int l = 0; l < LANES; l++) peak[l] = NEVER;
    int is_first = 1;
    for (int i = 0; i < 2; i++) {
        int64_t line = s->of[i].token, base = block.batch * s->of[i].batch + head * s->of[i].head;
        for (int64_t n = lanes.begin[i], keys; n < lanes.end[i]; n += keys, is_first = 0) {
            keys = MIN(KEYS, lanes.end[i] - n);
            product_scores(call->k[i] + base + n * line, line, keys, across, lanes.width, dim, scores);
            hide(&lanes, i, n, keys, scores);
            if (weigh(scores, keys, lanes.width, peak, sum, factor) && !is_first)
                for (int64_t r = 0; r < block.rows; r++)
                    for (int64_t x = 0; x < dim; x++) made[r * dim + x] *= factor[r];
            clear_spare(scores, keys, lanes.width);
            product_rows(scores, block.rows, call->v[i] + base + n * line, line, keys, made, dim, !is_first);
        }
    }
    for (int64_t r = 0; r < block.rows; r++) {
        int64_t to = line_of(s, block, head, r);
        float one = 1.0f / sum[r];
        if (is_first) memset(out + to * dim, 0, dim * sizeof *out);
        else
            for (int64_t x = 0; x < dim; x++) out[to * dim + x] = made[r * dim + x] * one;
        if (lse) lse[to] = is_first ? -INFINITY : peak[r] + logf(sum[r]);
    }
}

/* out [batch, queries, heads, dim]; lse [batch, queries, heads], or no memory where no backward follows. */
void span_attention(const int64_t *shape, const float *q, const float *prefix_k, const float *prefix_v, const float *own_k,
                    const float *own_v, const int32_t *bounds, float scale, float *out, float *lse) {
    Call call = {(const Shape *)shape, q, {prefix_k, own_k}, {prefix_v, own_v}, bounds, scale};
    Plan plan = planned(&call);
    int64_t heads = call.shape->kv_heads, tasks = plan.begin[call.shape->batch] * heads;
#pragma omp parallel for schedule(dynamic) if (tasks > 1)
    for (int64_t n = 0; n < tasks; n++) attend_block(&call, plan.blocks[n / heads], n % heads, out, lse);
    free(plan.blocks);
    free(plan.begin);
}
