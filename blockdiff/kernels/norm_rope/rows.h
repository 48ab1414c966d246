/* A row's norm and its gradients, for the C functions that need them. */

#include "cpu.h"

static inline float rstd_of(const float *x, int64_t width, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / width + eps);
}

/* grad of x from that of n = x * rstd, which stands in `grad`: rstd (g - x rstd^2 mean(g x)). */
static inline void through_norm(float *grad, const float *x, float rstd, int64_t width) {
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < width; i++) dot += grad[i] * x[i];
    float factor = dot / width * rstd * rstd * rstd;
#pragma omp simd
    for (int64_t i = 0; i < width; i++) grad[i] = grad[i] * rstd - x[i] * factor;
}

static inline void norm_into(float *out, const float *x, float rstd, const float *weight, int64_t width) {
    if (weight) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * rstd * weight[i];
    } else {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * rstd;
    }
}

/* sum = grad * weight, or that is added to it; a weight without memory is 1. */
static inline void add_weighted(float *sum, const float *grad, const float *weight, int64_t width, int first) {
#define EACH(step)         \
    _Pragma("omp simd") for (int64_t i = 0; i < width; i++) step
    if (first && weight)
        EACH(sum[i] = grad[i] * weight[i]);
    else if (first)
        EACH(sum[i] = grad[i]);
    else if (weight)
        EACH(sum[i] += grad[i] * weight[i]);
    else
        EACH(sum[i] += grad[i]);
#undef EACH
}

static inline void add_weight_grad(float *sum, const float *grad, const float *x, float rstd, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) sum[i] += grad[i] * x[i] * rstd;
}
