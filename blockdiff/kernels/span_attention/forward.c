/* Attention over two spans of keys per query: only visible keys are computed, and no scores are stored. */

#include "few.h"

/* Turn scores into weights relative to the highest score so far; factor: the correction of earlier weights. */
static int weigh(float *scores, int64_t keys, int64_t width, float *peak, float *sum, float *factor) {
    float high[LANES], total[LANES] = {0};
    int is_higher = 0;
    memcpy(high, peak, sizeof high);
    for (int64_t i = 0; i < keys; i++) {
        const float *x = scores + i * LANES;
#pragma omp simd
        for (int64_t l = 0; l < width; l++) high[l] = high[l] > x[l] ? high[l] : x[l];
    }
    for (int64_t i = 0; i < keys; i++) {
        float *x = scores + i * LANES;
#pragma omp simd
        for (int64_t l = 0; l < width; l++) {
            x[l] = exp_of(x[l] - high[l]);
            total[l] += x[l];
        }
    }
#pragma omp simd reduction(| : is_higher)
    for (int64_t l = 0; l < width; l++) {
        is_higher |= high[l] > peak[l];
        factor[l] = exp_of(peak[l] - high[l]);
        peak[l] = high[l];
        sum[l] = sum[l] * factor[l] + total[l];
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
    write_out(call, block, head, is_first, made, peak, sum, out, lse);
}

/* out [batch, queries, heads, dim]; lse [batch, queries, heads], NULL without a backward; room: memory of the plan. */
void span_attention(const int64_t *shape, const float *q, const float *prefix_k, const float *prefix_v, const float *own_k,
                    const float *own_v, const int32_t *bounds, float scale, float *out, float *lse,
                    int64_t *room) {
    Call call = {(const Shape *)shape, q, {prefix_k, own_k}, {prefix_v, own_v}, bounds, scale};
    Plan plan = planned(&call, room);
    int64_t heads = call.shape->kv_heads, tasks = plan.begin[call.shape->batch] * heads;
    int is_few = call.shape->queries * call.shape->group <= FEW;
#pragma omp parallel for schedule(dynamic) if (tasks > 1)
    for (int64_t n = 0; n < tasks; n++) {
        /* one head of a batch element after the other, so that its keys and values stay in the cache */
        int64_t b = plan.blocks[n / heads].batch, first = plan.begin[b], blocks = plan.begin[b + 1] - first;
        int64_t head = (n - first * heads) / blocks, block = first + (n - first * heads) % blocks;
        (is_few ? attend_few : attend_block)(&call, plan.blocks[block], head, out, lse);
    }
}
