/* The softmax of attention scores within the two spans that each query sees, in place. */

#include "cpu.h"

/* The ends of both spans among the keys of a call, of which `prefix` come before its own. */
static inline void spans_of(const int32_t *bounds, int64_t prefix, int64_t keys, int64_t ends[4]) {
    if (!bounds) {
        ends[0] = 0, ends[1] = keys, ends[2] = ends[3] = keys;
        return;
    }
    ends[0] = MAX(bounds[0], 0), ends[1] = MAX(MIN(bounds[1], prefix), ends[0]);
    ends[2] = prefix + MAX(bounds[2], 0), ends[3] = MAX(MIN(prefix + bounds[3], keys), ends[2]);
    ends[2] = MIN(ends[2], ends[3]);
}

static inline float peak_of(const float *x, int64_t lo, int64_t hi, float peak) {
#pragma omp simd reduction(max : peak)
    for (int64_t i = lo; i < hi; i++) peak = x[i] > peak ? x[i] : peak;
    return peak;
}

static inline float exponentials(float *x, int64_t lo, int64_t hi, float peak, float scale) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = lo; i < hi; i++) {
        x[i] = exp_of((x[i] - peak) * scale);
        sum += x[i];
    }
    return sum;
}

/* scores [batch * kv heads, group * queries, keys] become weights; bounds [batch, queries, 4] in lines of the given
   strides, or no memory where every query sees every key. A query that sees nothing has weights 0. */
void span_softmax(float *scores, int64_t batch, int64_t kv_heads, int64_t group, int64_t queries, int64_t keys,
                  int64_t prefix, const int32_t *bounds, int64_t batch_stride, int64_t query_stride, float scale) {
    int64_t of_batch = kv_heads * group * queries;
#pragma omp parallel for schedule(static) if (batch * of_batch * keys > MUCH)
    for (int64_t r = 0; r < batch * of_batch; r++) {
        float *x = scores + r * keys;
        int64_t ends[4];
        spans_of(bounds ? bounds + r / of_batch * batch_stride + r % queries * query_stride : NULL, prefix, keys, ends);
        float peak = peak_of(x, ends[2], ends[3], peak_of(x, ends[0], ends[1], -INFINITY));
        float sum = exponentials(x, ends[0], ends[1], peak, scale) + exponentials(x, ends[2], ends[3], peak, scale);
        float factor = 1.0f / sum;
        for (int64_t i = 0; i < ends[0]; i++) x[i] = 0;
        for (int64_t i = ends[0]; i < ends[1]; i++) x[i] *= factor;
        for (int64_t i = ends[1]; i < ends[2]; i++) x[i] = 0;
        for (int64_t i = ends[2]; i < ends[3]; i++) x[i] *= factor;
        for (int64_t i = ends[3]; i < keys; i++) x[i] = 0;
    }
}

/* In place: the gradient of the scores from that of the weights. */
void softmax_backward(float *grad, const float *weights, int64_t rows, int64_t keys, float scale) {
#pragma omp parallel for schedule(static) if (rows * keys > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        float *g = grad + r * keys, dot = 0;
        const float *w = weights + r * keys;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < keys; i++) dot += g[i] * w[i];
#pragma omp simd
        for (int64_t i = 0; i < keys; i++) g[i] = (g[i] - dot) * w[i] * scale;
    }
}
