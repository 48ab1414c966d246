/* The backward of attention over two spans of keys per query: weights are recomputed from the log-sum-exp. */

#include "blocks.h"

/* The gradients of keys and values of a kv head that a task adds to, rows `line` apart; NULL: not needed. */
typedef struct {
    float *k[2], *v[2];
    int64_t line[2];
} Grads;

static void load_rows(const float *const *at, int64_t width, int64_t dim, float *out) {
    for (int64_t r = 0; r < width; r++) memcpy(out + r * dim, at[r], dim * sizeof *out);
}

/* grad [keys, dim] (rows `line` apart) += weights [keys, LANES] times rows [LANES, dim]. */
static void product_keys(const float *weights, int64_t keys, const float *rows, int64_t width, float *grad, int64_t line,
                         int64_t dim) {
    product(weights, LANES, 1, keys, rows, dim, width, grad, line, dim, 1);
}

/* Turn scores [keys, LANES] into weights, and grads of the weights into grads of the unscaled scores. */
static void turn_back(float *scores, float *grads, int64_t keys, int64_t width, const float *lse, const float *dot,
                      float scale) {
    for (int64_t i = 0; i < keys; i++) {
        float *x = scores + i * LANES, *g = grads + i * LANES;
#pragma omp simd
        for (int64_t l = 0; l < width; l++) {
            x[l] = exp_of(x[l] - lse[l]);
            g[l] = x[l] * (g[l] - dot[l]) * scale;
        }
    }
}

static void turn_back_block(const Call *call, Block block, int64_t head, const float *grad_out, const float *out,
                            const float *lse, float *grad_q, Grads to) {
    const Shape *s = call->shape;
    int64_t dim = s->dim;
    float q[LANES * dim] __attribute__((aligned(64))), q_across[dim * LANES] __attribute__((aligned(64)));
    float grad[LANES * dim] __attribute__((aligned(64))), grad_across[dim * LANES] __attribute__((aligned(64)));
    float made[LANES * dim] __attribute__((aligned(64)));
    float scores[(KEYS + SPARE) * LANES] __attribute__((aligned(64)));
    float grads[(KEYS + SPARE) * LANES] __attribute__((aligned(64)));
    float sums[LANES], dots[LANES] = {0};
    const float *grad_at[LANES], *out_at[LANES];
    Lanes lanes;
    look(call, block, head, &lanes);
    for (int64_t r = 0; r < lanes.width; r++) {
        int64_t at = r < block.rows ? line_of(s, block, head, r) : 0;
        grad_at[r] = r < block.rows ? grad_out + at * dim : zeros;
        out_at[r] = r < block.rows ? out + at * dim : zeros;
        sums[r] = r < block.rows ? lse[at] : 0;
    }
    load_rows(lanes.at, lanes.width, dim, q);
    load_rows(grad_at, lanes.width, dim, grad);
    transpose_rows(grad_at, lanes.width, dim, 1.0f, grad_across);
    transpose_rows(out_at, lanes.width, dim, 1.0f, q_across);
    /* summed in the order of the products below, so that both are bit-equal for a query that sees one key */
    for (int64_t x = 0; x < dim; x++)
#pragma omp simd
        for (int64_t l = 0; l < lanes.width; l++) dots[l] += q_across[x * LANES + l] * grad_across[x * LANES + l];
    transpose_rows(lanes.at, lanes.width, dim, call->scale, q_across);
    int is_first = 1;
    for (int i = 0; i < 2; i++) {
        int64_t line = s->of[i].token, base = block.batch * s->of[i].batch + head * s->of[i].head;
        for (int64_t n = lanes.begin[i], keys; n < lanes.end[i]; n += keys, is_first = 0) {
            keys = MIN(KEYS, lanes.end[i] - n);
            const float *k = call->k[i] + base + n * line, *v = call->v[i] + base + n * line;
            product_scores(k, line, keys, q_across, lanes.width, dim, scores);
            product_scores(v, line, keys, grad_across, lanes.width, dim, grads);
            hide(&lanes, i, n, keys, scores);
            turn_back(scores, grads, keys, lanes.width, sums, dots, call->scale);
            clear_spare(scores, keys, lanes.width);
            clear_spare(grads, keys, lanes.width);
            product_rows(grads, block.rows, k, line, keys, made, dim, !is_first);
            if (!to.k[i]) continue;
            product_keys(scores, keys, grad, block.rows, to.v[i] + n * to.line[i], to.line[i], dim);
            product_keys(grads, keys, q, block.rows, to.k[i] + n * to.line[i], to.line[i], dim);
        }
    }
    for (int64_t r = 0; r < block.rows; r++) {
        float *line = grad_q + line_of(s, block, head, r) * dim;
        if (is_first) memset(line, 0, dim * sizeof *line);
        else memcpy(line, made + r * dim, dim * sizeof *line);
    }
}

/* The gradients of a kv head in [batch, grad_tokens, kv heads, dim] of both sources, which may share memory. */
static Grads whole(const Shape *s, float *const grads[4], int64_t b, int64_t head) {
    Grads to = {0};
    for (int i = 0; i < 2; i++) {
        if (!grads[2 * i]) continue;
        int64_t at = (b * s->of[i].grad_tokens * s->kv_heads + head) * s->dim;
        to.k[i] = grads[2 * i] + at, to.v[i] = grads[2 * i + 1] + at, to.line[i] = s->kv_heads * s->dim;
    }
    return to;
}

static void clear(Grads to, const int64_t begin[2], const int64_t end[2], int64_t dim) {
    for (int i = 0; i < 2; i++)
        for (int64_t t = begin[i]; to.k[i] && t < end[i]; t++) {
            memset(to.k[i] + t * to.line[i], 0, dim * sizeof(float));
            memset(to.v[i] + t * to.line[i], 0, dim * sizeof(float));
        }
}

/* The part of `partial` of a task: [k and v] of the prefix's tokens, then of the own ones. */
static Grads part_of(const Shape *s, float *partial, float *const grads[4], int64_t task) {
    Grads to = {0};
    int64_t tokens = s->of[0].tokens + s->of[1].tokens;
    float *at = partial + task * 2 * tokens * s->dim;
    for (int i = 0; i < 2; at += 2 * s->of[i++].tokens * s->dim)
        if (grads[2 * i]) to.k[i] = at, to.v[i] = at + s->of[i].tokens * s->dim, to.line[i] = s->dim;
    return to;
}

static Hull hull_of(const Call *call, const Plan *plan, int64_t from, int64_t to) {
    Hull hull = {{INT64_MAX, INT64_MAX}, {0, 0}};
    for (int64_t n = from; n < to; n++) {
        Block block = plan->blocks[n];
        for (int64_t t = block.first / call->shape->group; t * call->shape->group < block.first + block.rows; t++) {
            int64_t lo[2], hi[2];
            spans_of(call, block.batch, t, lo, hi);
            for (int i = 0; i < 2; i++)
                if (lo[i] < hi[i]) hull.begin[i] = MIN(hull.begin[i], lo[i]), hull.end[i] = MAX(hull.end[i], hi[i]);
        }
    }
    return hull;
}

/* grad_q: as out. A kv head of a batch element is one task, or `chunks` tasks with partial sums in `partial`, which are
   then added in their order, so that the number of threads changes no bits. */
void span_attention_backward(const int64_t *shape, const float *q, const float *prefix_k, const float *prefix_v,
                             const float *own_k, const float *own_v, const int32_t *bounds, float scale,
                             const float *grad_out, const float *out, const float *lse, float *grad_q,
                             float *grad_prefix_k, float *grad_prefix_v, float *grad_own_k, float *grad_own_v,
                             float *partial, int64_t *room) {
    Call call = {(const Shape *)shape, q, {prefix_k, own_k}, {prefix_v, own_v}, bounds, scale};
    const Shape *s = call.shape;
    float *const grads[4] = {grad_prefix_k, grad_prefix_v, grad_own_k, grad_own_v};
    Plan plan = planned(&call, room);
    int64_t chunks = s->chunks, tasks = s->batch * s->kv_heads * chunks;
    const Hull everything = {{0, 0}, {s->of[0].tokens, s->of[1].tokens}};
#pragma omp parallel for schedule(dynamic) if (tasks > 1)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t chunk = task % chunks, head = task / chunks % s->kv_heads, b = task / chunks / s->kv_heads;
        int64_t first = plan.begin[b], blocks = plan.begin[b + 1] - first;
        int64_t from = first + blocks * chunk / chunks, to = first + blocks * (chunk + 1) / chunks;
        Grads target = chunks == 1 ? whole(s, grads, b, head) : part_of(s, partial, grads, task);
        Hull hull = everything;
        if (chunks > 1) hull = plan.hulls[task] = hull_of(&call, &plan, from, to);
        clear(target, hull.begin, hull.end, s->dim);
        for (int64_t n = from; n < to; n++)
            turn_back_block(&call, plan.blocks[n], head, grad_out, out, lse, grad_q, target);
    }
    if (chunks > 1)
#pragma omp parallel for schedule(static)
        for (int64_t n = 0; n < s->batch * s->kv_heads; n++) {
            Grads target = whole(s, grads, n / s->kv_heads, n % s->kv_heads);
            clear(target, everything.begin, everything.end, s->dim);
            for (int64_t task = n * chunks; task < (n + 1) * chunks; task++) {
                Grads from = part_of(s, partial, grads, task);
                for (int i = 0; i < 2; i++)
                    if (target.k[i])
                        for (int64_t t = plan.hulls[task].begin[i]; t < plan.hulls[task].end[i]; t++)
                            for (int64_t x = 0; x < s->dim; x++) {
                                target.k[i][t * target.line[i] + x] += from.k[i][t * s->dim + x];
                                target.v[i][t * target.line[i] + x] += from.v[i][t * s->dim + x];
                            }
            }
        }
}
