/* What stands between the products of a layer, row by row in one walk: residual sums and the norms around them. */

#include "norm_rope/rows.h"

/* sum = x + norm(y) * weight, and up to three norms of the sum; rstd [2, rows] of y and of the sum, or no memory. */
void residual_norms(const float *x, const float *y, int64_t rows, int64_t width, float eps, const float *weight,
                    float *rstd, float *sum, const float *weight_0, float *out_0, const float *weight_1, float *out_1,
                    const float *weight_2, float *out_2) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        const float *of_x = x + r * width, *of_y = y + r * width;
        float *of_sum = sum + r * width, of_branch = rstd_of(of_y, width, eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) of_sum[i] = of_x[i] + of_y[i] * of_branch * weight[i];
        float scale = rstd_of(of_sum, width, eps);
        if (rstd) rstd[r] = of_branch, rstd[rows + r] = scale;
        norm_into(out_0 + r * width, of_sum, scale, weight_0, width);
        if (out_1) norm_into(out_1 + r * width, of_sum, scale, weight_1, width);
        if (out_2) norm_into(out_2 + r * width, of_sum, scale, weight_2, width);
    }
}

/* Add the gradient of one norm's output to that of n = x * rstd, and to its weight's where that is wanted. */
static inline void take_gradient(float *of_n, const float *grad, const float *x, float rstd, const float *weight,
                                 float *of_weight, int64_t width, int is_first) {
    if (of_weight) add_weight_grad(of_weight, grad, x, rstd, width);
    add_weighted(of_n, grad, weight, width, is_first);
}

/* Its gradients; that of the sum itself may be no memory, as may that of a weight. `partial` is [4, BLOCKS, width]. */
void residual_norms_backward(const float *grad_sum, const float *sum, const float *y, int64_t rows, int64_t width,
                             const float *rstd, const float *weight, float *of_weight, const float *grad_0,
                             const float *weight_0, float *of_weight_0, const float *grad_1, const float *weight_1,
                             float *of_weight_1, const float *grad_2, const float *weight_2, float *of_weight_2,
                             float *partial, float *grad_x, float *grad_y) {
    const float *grads[3] = {grad_0, grad_1, grad_2}, *weights[3] = {weight_0, weight_1, weight_2};
    float *of_weights[4] = {of_weight_0, of_weight_1, of_weight_2, of_weight};
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t b = 0; b < BLOCKS; b++) {
        float *partials[4];
        for (int j = 0; j < 4; j++) {
            partials[j] = of_weights[j] ? partial + (j * BLOCKS + b) * width : NULL;
            if (partials[j]) memset(partials[j], 0, width * sizeof *partial);
        }
        for (int64_t r = first_row(b, rows); r < first_row(b + 1, rows); r++) {
            const float *of_sum = sum + r * width, *of_y = y + r * width;
            float *of_x = grad_x + r * width, *of_branch = grad_y + r * width;
            int is_first = 1;
            for (int j = 0; j < 3; j++) {
                if (!grads[j]) continue;
                take_gradient(of_x, grads[j] + r * width, of_sum, rstd[rows + r], weights[j], partials[j], width,
                              is_first);
                is_first = 0;
            }
            through_norm(of_x, of_sum, rstd[rows + r], width);
            if (grad_sum) {
                const float *more = grad_sum + r * width;
#pragma omp simd
                for (int64_t i = 0; i < width; i++) of_x[i] += more[i];
            }
            take_gradient(of_branch, of_x, of_y, rstd[r], weight, partials[3], width, 1);
            through_norm(of_branch, of_y, rstd[r], width);
        }
    }
    for (int j = 0; j < 4; j++)
        if (of_weights[j]) add_up(partial + j * BLOCKS * width, width, of_weights[j]);
}

/* (x + norm(norm(dense) + norm(routed))) * scalar, each norm with a weight, the scalar being one for each row, one for
   all (step 0) or none; rstd [3, rows] of dense, routed and their sum, or no memory. */
void layer_end(const float *x, const float *dense, const float *routed, int64_t rows, int64_t width, float eps,
               const float *weight_dense, const float *weight_routed, const float *weight_both, const float *scalar,
               int64_t step, float *rstd, float *out) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        const float *of_x = x + r * width, *of_dense = dense + r * width, *of_routed = routed + r * width;
        float *both = out + r * width, factor = scalar ? scalar[r * step] : 1.0f;
        float by_dense = rstd_of(of_dense, width, eps), by_routed = rstd_of(of_routed, width, eps);
        norm_into(both, of_dense, by_dense, weight_dense, width);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) both[i] += of_routed[i] * by_routed * weight_routed[i];
        float scale = rstd_of(both, width, eps);
        if (rstd) rstd[r] = by_dense, rstd[rows + r] = by_routed, rstd[2 * rows + r] = scale;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) both[i] = (of_x[i] + both[i] * scale * weight_both[i]) * factor;
    }
}

/* Its gradients, for which the sum of both branches is made again; grad_x may be no memory where there is no scalar: it
   is `grad` itself then. `partial` is [3, BLOCKS, width]; the gradient of a weight may be no memory. */
void layer_end_backward(const float *grad, const float *dense, const float *routed, int64_t rows, int64_t width,
                        const float *rstd, const float *weight_dense, const float *weight_routed,
                        const float *weight_both, const float *scalar, int64_t step, float *partial, float *grad_x,
                        float *grad_dense, float *grad_routed, float *of_dense, float *of_routed, float *of_both) {
    float *of_weights[3] = {of_dense, of_routed, of_both};
    memset(partial, 0, 3 * BLOCKS * width * sizeof *partial);
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t b = 0; b < BLOCKS; b++) {
        float *sum_dense = partial + b * width, *sum_routed = sum_dense + BLOCKS * width;
        float *sum_both = sum_routed + BLOCKS * width;
        for (int64_t r = first_row(b, rows); r < first_row(b + 1, rows); r++) {
            const float *g = grad + r * width, *d = dense + r * width, *e = routed + r * width;
            float *to_dense = grad_dense + r * width, *both = grad_routed + r * width;
            float by_dense = rstd[r], by_routed = rstd[rows + r], scale = rstd[2 * rows + r];
            float factor = scalar ? scalar[r * step] : 1.0f, dot = 0, dot_dense = 0, dot_routed = 0;
            if (scalar) {
                float *of_x = grad_x + r * width;
#pragma omp simd
                for (int64_t i = 0; i < width; i++) of_x[i] = g[i] * factor;
                g = of_x;
            }
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < width; i++) {
                float sum = d[i] * by_dense * weight_dense[i] + e[i] * by_routed * weight_routed[i];
                float weighted = g[i] * weight_both[i];
                sum_both[i] += g[i] * sum * scale;
                dot += weighted * sum;
                both[i] = sum;
                to_dense[i] = weighted;
            }
            float share = dot / width * scale * scale * scale;
#pragma omp simd reduction(+ : dot_dense, dot_routed)
            for (int64_t i = 0; i < width; i++) {
                float of_sum = to_dense[i] * scale - both[i] * share;
                float of_d = of_sum * weight_dense[i], of_e = of_sum * weight_routed[i];
                sum_dense[i] += of_sum * d[i] * by_dense;
                sum_routed[i] += of_sum * e[i] * by_routed;
                dot_dense += of_d * d[i];
                dot_routed += of_e * e[i];
                to_dense[i] = of_d;
                both[i] = of_e;
            }
            float share_dense = dot_dense / width * by_dense * by_dense * by_dense;
            float share_routed = dot_routed / width * by_routed * by_routed * by_routed;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                to_dense[i] = to_dense[i] * by_dense - d[i] * share_dense;
                both[i] = both[i] * by_routed - e[i] * share_routed;
            }
        }
    }
    for (int j = 0; j < 3; j++)
        if (of_weights[j]) add_up(partial + j * BLOCKS * width, width, of_weights[j]);
}
