/* The products of linear layers and of experts. `pieces` says by what: 0 by the vector unit, else by the tile unit, of
   numbers in so many pieces. */

#include <stdlib.h>

#include "cpu.h"

#define MOST 3 /* weights that share an input; one of no width is none */

static void make(const Product *products, int64_t count, int64_t pieces) {
    if (pieces)
        multiply_in_tiles(products, count, pieces);
    else
        multiply(products, count);
}

/* out [rows, columns] = left [rows, steps] right [steps, columns], or added to it; sides lie in any way. */
void product(const float *left, int64_t left_by_row, int64_t left_by_step, const float *right, int64_t right_by_column,
             int64_t right_by_step, int64_t rows, int64_t columns, int64_t steps, int64_t adds, float *out,
             int64_t stride, int64_t pieces) {
    Product all = {.left = {left, left_by_row, left_by_step}, .right = {right, right_by_column, right_by_step},
                   .out = out, stride, rows, columns, steps, adds};
    make(&all, 1, pieces);
}

/* x [rows, depth] times each weight [wide, depth], transposed. */
void linear(const float *x, int64_t rows, int64_t depth, int64_t pieces, const float *weight_0, int64_t wide_0,
            float *out_0, const float *weight_1, int64_t wide_1, float *out_1, const float *weight_2, int64_t wide_2,
            float *out_2) {
    const float *weights[MOST] = {weight_0, weight_1, weight_2};
    float *outs[MOST] = {out_0, out_1, out_2};
    int64_t wide[MOST] = {wide_0, wide_1, wide_2}, count = 0;
    Product each[MOST];
    for (int n = 0; n < MOST; n++)
        if (wide[n])
            each[count++] = (Product){.left = {x, depth, 1}, .right = {weights[n], depth, 1},
                                      .out = outs[n], wide[n], rows, wide[n], depth};
    make(each, count, pieces);
}

/* The gradient of x: the sum over the weights of grad [rows, wide] times weight [wide, depth]. */
void linear_backward_x(float *grad_x, int64_t rows, int64_t depth, int64_t pieces, const float *weight_0,
                       int64_t wide_0, const float *grad_0, const float *weight_1, int64_t wide_1, const float *grad_1,
                       const float *weight_2, int64_t wide_2, const float *grad_2) {
    const float *weights[MOST] = {weight_0, weight_1, weight_2}, *grads[MOST] = {grad_0, grad_1, grad_2};
    int64_t wide[MOST] = {wide_0, wide_1, wide_2};
    Product each[MOST];
    for (int n = 0; n < MOST; n++)
        each[n] = (Product){.left = {grads[n], wide[n], 1}, .right = {weights[n], 1, depth},
                            .out = grad_x, depth, rows, depth, wide[n],
                            .more = n + 1 < MOST && wide[n + 1] ? each + n + 1 : NULL};
    make(each, 1, pieces);
}

/* The gradients of weights: grad [rows, wide] transposed times x [rows, depth]. */
void linear_backward_weights(const float *x, int64_t rows, int64_t depth, int64_t pieces, float *out_0, int64_t wide_0,
                             const float *grad_0, float *out_1, int64_t wide_1, const float *grad_1, float *out_2,
                             int64_t wide_2, const float *grad_2) {
    const float *grads[MOST] = {grad_0, grad_1, grad_2};
    float *outs[MOST] = {out_0, out_1, out_2};
    int64_t wide[MOST] = {wide_0, wide_1, wide_2}, count = 0;
    Product each[MOST];
    for (int n = 0; n < MOST; n++)
        if (wide[n])
            each[count++] = (Product){.left = {grads[n], 1, wide[n]}, .right = {x, 1, depth},
                                      .out = outs[n], depth, wide[n], depth, rows};
    make(each, count, pieces);
}

/* Rows of x [M, depth], or those of tokens, times the matrix of their expert, which holds element (d, w) at
   d * by_depth + w * by_width: written, or added to what is there. */
void product_grouped(const float *x, const int64_t *token, const int32_t *ends, int64_t experts, int64_t depth,
                     const float *weights, int64_t apart, int64_t by_depth, int64_t by_width, int64_t wide, int64_t adds,
                     float *out, int64_t pieces) {
    Product *each = malloc(experts * sizeof *each);
    if (!each) abort();
    for (int64_t e = 0, begin = 0; e < experts; begin = ends[e++])
        each[e] = (Product){
            .left = {token ? x : x + begin * depth, depth, 1, .line_token = token ? token + begin : NULL},
            .right = {weights + e * apart, by_width, by_depth},
            .out = out + begin * wide, wide, ends[e] - begin, wide, depth, adds};
    make(each, experts, pieces);
    free(each);
}

/* Per expert left [M, wide] transposed times right [M, depth]; rows of either side can be those of tokens. */
void product_grouped_outer(const float *left, const int64_t *left_token, const float *right, const int64_t *right_token,
                           const int32_t *ends, int64_t experts, int64_t wide, int64_t depth, float *out,
                           int64_t pieces) {
    Product *each = malloc(experts * sizeof *each);
    if (!each) abort();
    for (int64_t e = 0, begin = 0; e < experts; begin = ends[e++])
        each[e] = (Product){
            .left = {left_token ? left : left + begin * wide, 1, wide, .step_token = left_token ? left_token + begin : NULL},
            .right = {right_token ? right : right + begin * depth, 1, depth,
                      .step_token = right_token ? right_token + begin : NULL},
            .out = out + e * wide * depth, depth, wide, depth, ends[e] - begin};
    make(each, experts, pieces);
    free(each);
}
