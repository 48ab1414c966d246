/* Norms, and norms followed by RoPE; each tensor is read and written once per direction. */

#include "loops.h"

static inline float rstd_of(const float *x, int64_t width, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / width + eps);
}

/* Replace `grad`, the gradient g of n = x * rstd, by the gradient of x: rstd (g - x rstd^2 mean(g x)). */
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

/* Set sum to grad * weight, or add it; weight NULL: 1. */
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

/* Up to three norms of x; output NULL: none, weight NULL: 1. */
void norms(const float *x, int64_t rows, int64_t width, float eps, float *rstd, const float *weight_0, float *out_0,
           const float *weight_1, float *out_1, const float *weight_2, float *out_2) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        const float *of_row = x + r * width;
        float scale = rstd_of(of_row, width, eps);
        if (rstd) rstd[r] = scale;
        norm_into(out_0 + r * width, of_row, scale, weight_0, width);
        if (out_1) norm_into(out_1 + r * width, of_row, scale, weight_1, width);
        if (out_2) norm_into(out_2 + r * width, of_row, scale, weight_2, width);
    }
}

/* The gradients of x and, unless NULL, of the weights; `partial` is [3, BLOCKS, width]. */
void norms_backward(const float *x, int64_t rows, int64_t width, const float *rstd, const float *grad_0, const float *weight_0, float *of_weight_0, const float *grad_1,
                    const float *weight_1, float *of_weight_1, const float *grad_2, const float *weight_2,
                    float *of_weight_2, float *partial, float *grad_x) {
    const float *grads[3] = {grad_0, grad_1, grad_2}, *weights[3] = {weight_0, weight_1, weight_2};
    float *of_weights[3] = {of_weight_0, of_weight_1, of_weight_2};
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t b = 0; b < BLOCKS; b++) {
        for (int j = 0; j < 3; j++)
            if (of_weights[j]) memset(partial + (j * BLOCKS + b) * width, 0, width * sizeof *partial);
        for (int64_t r = first_row(b, rows); r < first_row(b + 1, rows); r++) {
            const float *of_row = x + r * width;
            float *out = grad_x + r * width;
            int first = 1;
            for (int j = 0; j < 3; j++) {
                if (!grads[j]) continue;
                const float *grad = grads[j] + r * width;
                if (of_weights[j]) add_weight_grad(partial + (j * BLOCKS + b) * width, grad, of_row, rstd[r], width);
                add_weighted(out, grad, weights[j], width, first);
                first = 0;
            }
            through_norm(out, of_row, rstd[r], width);
        }
    }
    for (int j = 0; j < 3; j++)
        if (of_weights[j]) add_up(partial + j * BLOCKS * width, width, of_weights[j]);
}

/* (x + norm(y) * weight) * scalar; scalar: one per row (step 1), one for all (step 0) or NULL. */
void add_norm(const float *x, const float *y, int64_t rows, int64_t width, float eps, const float *weight,
              const float *scalar, int64_t step, float *rstd, float *out) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        const float *of_x = x + r * width, *of_y = y + r * width;
        float scale = rstd_of(of_y, width, eps), factor = scalar ? scalar[r * step] : 1.0f;
        if (rstd) rstd[r] = scale;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[r * width + i] = (of_x[i] + of_y[i] * scale * weight[i]) * factor;
    }
}

/* The gradients of add_norm; without a scalar grad_x may be NULL, since it equals `grad`. */
void add_norm_backward(const float *grad, const float *y, int64_t rows, int64_t width, const float *rstd,
                       const float *weight, const float *scalar, int64_t step, float *partial, float *grad_x,
                       float *grad_y, float *grad_weight) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t b = 0; b < BLOCKS; b++) {
        memset(partial + b * width, 0, width * sizeof *partial);
        for (int64_t r = first_row(b, rows); r < first_row(b + 1, rows); r++) {
            const float *of_grad = grad + r * width, *of_y = y + r * width;
            float *out = grad_y + r * width, factor = scalar ? scalar[r * step] : 1.0f;
            if (scalar) {
                float *of_x = grad_x + r * width;
                for (int64_t i = 0; i < width; i++) of_x[i] = of_grad[i] * factor;
                of_grad = of_x;
            }
            add_weight_grad(partial + b * width, of_grad, of_y, rstd[r], width);
            add_weighted(out, of_grad, weight, width, 1);
            through_norm(out, of_y, rstd[r], width);
        }
    }
    add_up(partial, width, grad_weight);
}

/* Strides of a tensor [B, T, heads, width] whose last axis is contiguous. */
typedef struct {
    int64_t batch, token, head;
} Strides;

static inline int64_t head_at(int64_t row, int64_t tokens, int64_t heads, Strides by) {
    int64_t token = row / heads;
    return token / tokens * by.batch + token % tokens * by.token + row % heads * by.head;
}

/* The norm of every head, then the rotation of its halves. cos and sin [B * T, width] (NULL: no rotation); weight NULL:
   1. */
void norm_rope(const float *x, int64_t x_batch, int64_t x_token, int64_t x_head, int64_t batch, int64_t tokens,
               int64_t heads, int64_t width, float eps, const float *weight, const float *cos, const float *sin,
               float *rstd, float *out, int64_t out_batch, int64_t out_token, int64_t out_head) {
    int64_t rows = batch * tokens * heads, half = width / 2;
    Strides by = {x_batch, x_token, x_head}, to = {out_batch, out_token, out_head};
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        const float *low = x + head_at(r, tokens, heads, by), *high = low + half;
        float scale = rstd_of(low, width, eps), *of_row = out + head_at(r, tokens, heads, to);
        if (rstd) rstd[r] = scale;
        if (!cos) {
            norm_into(of_row, low, scale, weight, width);
            continue;
        }
        const float *c = cos + r / heads * width, *s = sin + r / heads * width;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            float a = low[i] * scale * weight[i], b = high[i] * scale * weight[half + i];
            of_row[i] = a * c[i] + b * s[i];
            of_row[half + i] = b * c[half + i] + a * s[half + i];
        }
    }
}

/* The gradients of x, contiguous, and of the weight if there is one. */
void norm_rope_backward(const float *grad, int64_t g_batch, int64_t g_token, int64_t g_head, const float *x,
                        int64_t x_batch, int64_t x_token, int64_t x_head, int64_t batch, int64_t tokens, int64_t heads,
                        int64_t width, const float *rstd, const float *weight, const float *cos, const float *sin,
                        float *partial, float *grad_x, float *grad_weight) {
    int64_t rows = batch * tokens * heads, half = width / 2;
    Strides by = {x_batch, x_token, x_head}, from = {g_batch, g_token, g_head};
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t b = 0; b < BLOCKS; b++) {
        float *sum = partial + b * width;
        memset(sum, 0, width * sizeof *sum);
        for (int64_t r = first_row(b, rows); r < first_row(b + 1, rows); r++) {
            const float *of_row = x + head_at(r, tokens, heads, by), *g = grad + head_at(r, tokens, heads, from);
            float *out = grad_x + r * width;
            if (cos) {
                const float *c = cos + r / heads * width, *s = sin + r / heads * width;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    float low = g[i] * c[i] + g[half + i] * s[half + i], high = g[half + i] * c[half + i] + g[i] * s[i];
                    sum[i] += low * of_row[i] * rstd[r];
                    sum[half + i] += high * of_row[half + i] * rstd[r];
                    out[i] = low * weight[i];
                    out[half + i] = high * weight[half + i];
                }
            } else {
                if (grad_weight) add_weight_grad(sum, g, of_row, rstd[r], width);
                add_weighted(out, g, weight, width, 1);
            }
            through_norm(out, of_row, rstd[r], width);
        }
    }
    if (grad_weight) add_up(partial, width, grad_weight);
}
