/* Gated activations, routing, and the sort of tokens by expert. */

#include "loops.h"

enum { GELU_TANH, SILU };

#define SLOPE 1.5957691216f   /* 2 sqrt(2 / pi): gelu_tanh(x) = x sigmoid(SLOPE (x + CUBE x^3)) */
#define CUBE 0.044715f
#define LOG2_E 1.4426950409f
#define LN_2 0.6931471806f
#define FARTHEST 125.0f       /* exponents beyond which a share, or 1 - share, is 0 in fp32 */

/* 1 / x for x from 1 to 2^126, to about one unit in the last place, without a division: negating the exponent bits is
   right to 12 %, and each step cubes the error. */
static inline float reciprocal_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = 0x7EF311C7 - bits;
    float y;
    memcpy(&y, &bits, sizeof y);
    float error = 1.0f - x * y;
    y += y * (error + error * error);
    error = 1.0f - x * y;
    return y + y * (error + error * error);
}

/* The sigmoid that a gate is multiplied by: 1 / (1 + 2^-n e^r), where -n ln 2 + r is minus the sigmoid's argument. */
static inline float share_of(float x, int kind) {
    float y = kind == GELU_TANH ? x * (SLOPE * LOG2_E + SLOPE * LOG2_E * CUBE * (x * x)) : x;
    float most = kind == GELU_TANH ? FARTHEST : FARTHEST * LN_2;
    y = y < -most ? -most : y;
    y = y > most ? most : y;
    float rounded = kind == GELU_TANH ? y + ROUNDS : y * LOG2_E + ROUNDS, n = rounded - ROUNDS;
    float r = kind == GELU_TANH ? (n - y) * LN_2 : n * 0.693359375f - y - n * 2.12194440e-4f;
    int32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    bits = (int32_t)((127u - (uint32_t)bits) << 23);
    float power, p = 1.9875691500e-4f; /* Cephes' expf */
    memcpy(&power, &bits, sizeof power);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    return reciprocal_of(p * power + 1.0f);
}

static inline float slope_of(float x, float share, int kind) {
    float inner = kind == GELU_TANH ? SLOPE * (1.0f + 3.0f * CUBE * x * x) : 1.0f;
    return share + x * share * (1.0f - share) * inner;
}

static inline void gate_row(const float *gate, const float *up, float factor, float *out, int64_t width, int kind) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = gate[i] * share_of(gate[i], kind) * up[i] * factor;
}

/* out = f(gate) * up * weight of the row (NULL: 1); rows of gate and up are `stride` elements apart. */
void gated(const float *gate, const float *up, int64_t rows, int64_t width, int64_t stride, const float *weight,
           int64_t kind, float *out) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        float factor = weight ? weight[r] : 1.0f;
        if (kind == GELU_TANH)
            gate_row(gate + r * stride, up + r * stride, factor, out + r * width, width, GELU_TANH);
        else
            gate_row(gate + r * stride, up + r * stride, factor, out + r * width, width, SILU);
    }
}

static inline float gate_row_backward(const float *grad, const float *gate, const float *up, float factor,
                                      float *of_gate, float *of_up, float *product, int64_t width, int kind) {
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < width; i++) {
        float share = share_of(gate[i], kind), activated = gate[i] * share, g = grad[i];
        dot += g * activated * up[i];
        of_up[i] = g * factor * activated;
        of_gate[i] = g * factor * up[i] * slope_of(gate[i], share, kind);
        if (product) product[i] = activated * up[i] * factor;
    }
    return dot;
}

/* The gradients of gate and up (rows `to_stride` apart) and, unless NULL, of the rows' weights; also the output of
   `gated`, unless NULL, which may overwrite `grad`. */
void gated_backward(const float *grad, const float *gate, const float *up, int64_t rows, int64_t width, int64_t stride,
                    const float *weight, int64_t kind, float *of_gate, float *of_up, int64_t to_stride,
                    float *of_weight, float *product) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        float factor = weight ? weight[r] : 1.0f, dot;
        const float *of_row = grad + r * width;
        float *again = product ? product + r * width : NULL;
        if (kind == GELU_TANH)
            dot = gate_row_backward(of_row, gate + r * stride, up + r * stride, factor, of_gate + r * to_stride,
                                    of_up + r * to_stride, again, width, GELU_TANH);
        else
            dot = gate_row_backward(of_row, gate + r * stride, up + r * stride, factor, of_gate + r * to_stride,
                                    of_up + r * to_stride, again, width, SILU);
        if (of_weight) of_weight[r] = dot;
    }
}

/* The k best of each row of scores (ties to the lower index), their softmax, and that times a scale per expert. */
void route(const float *scores, int64_t rows, int64_t experts, int64_t k, const float *scale, int64_t *index,
           float *share, float *weight) {
#pragma omp parallel for schedule(static) if (rows * experts * k > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        const float *of_row = scores + r * experts;
        int64_t *chosen = index + r * k;
        float *shares = share + r * k, total = 0;
        for (int64_t j = 0; j < k; j++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++) {
                int is_taken = 0;
                for (int64_t i = 0; i < j; i++) is_taken |= chosen[i] == e;
                if (!is_taken && (best < 0 || of_row[e] > of_row[best])) best = e;
            }
            chosen[j] = best;
            shares[j] = exp_of(of_row[best] - of_row[chosen[0]]);
            total += shares[j];
        }
        for (int64_t j = 0; j < k; j++) {
            shares[j] /= total;
            weight[r * k + j] = shares[j] * scale[chosen[j]];
        }
    }
}

/* The gradients of the scores [rows, experts] and of the scale per expert, whose partial sums are [BLOCKS, experts]. */
void route_backward(const float *grad, int64_t rows, int64_t experts, int64_t k, const float *scale,
                    const int64_t *index, const float *share, float *partial, float *of_scores, float *of_scale) {
#pragma omp parallel for schedule(static) if (rows * experts * k > MUCH)
    for (int64_t b = 0; b < BLOCKS; b++) {
        float *sum = partial + b * experts;
        memset(sum, 0, experts * sizeof *sum);
        for (int64_t r = first_row(b, rows); r < first_row(b + 1, rows); r++) {
            const int64_t *chosen = index + r * k;
            const float *shares = share + r * k, *g = grad + r * k;
            float *out = of_scores + r * experts, mean = 0;
            memset(out, 0, experts * sizeof *out);
            for (int64_t j = 0; j < k; j++) mean += g[j] * scale[chosen[j]] * shares[j];
            for (int64_t j = 0; j < k; j++) {
                out[chosen[j]] = shares[j] * (g[j] * scale[chosen[j]] - mean);
                sum[chosen[j]] += g[j] * shares[j];
            }
        }
    }
    add_up(partial, experts, of_scale);
}

static inline int64_t expert_of(const int64_t *index, int64_t slot, int64_t experts) {
    return index[slot] >= 0 && index[slot] < experts ? index[slot] : experts;
}

/* Sort slots by expert, stably; index `experts` means no expert and comes last.

   ends [experts]: the end of each expert's rows. slot, token: the slot of each row, and slot / k. place: the row of
   each slot. next [experts + 2]: working memory. */
void group_by_expert(const int64_t *index, int64_t slots, int64_t k, int64_t experts, int64_t *next, int32_t *ends,
                     int64_t *slot, int64_t *token, int64_t *place) {
    memset(next, 0, (experts + 2) * sizeof *next);
    for (int64_t s = 0; s < slots; s++) next[expert_of(index, s, experts) + 1]++;
    for (int64_t e = 0; e <= experts; e++) next[e + 1] += next[e];
    for (int64_t e = 0; e < experts; e++) ends[e] = (int32_t)next[e + 1];
    for (int64_t s = 0; s < slots; s++) {
        int64_t row = next[expert_of(index, s, experts)]++;
        slot[row] = s;
        token[row] = s / k;
        place[s] = row;
    }
}

/* Copy the token of each row. */
void gather_tokens(const float *x, const int64_t *token, int64_t rows, int64_t width, float *out) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) memcpy(out + r * width, x + token[r] * width, width * sizeof *out);
}

/* Sum the rows of each token's k slots; rows at or after `rows` have no expert and are left out. */
void combine_slots(const float *y, const int64_t *place, int64_t tokens, int64_t k, int64_t rows, int64_t width,
                   float *out) {
#pragma omp parallel for schedule(static) if (tokens * k * width > MUCH)
    for (int64_t n = 0; n < tokens; n++) {
        float *of_token = out + n * width;
        memset(of_token, 0, width * sizeof *out);
        for (int64_t j = 0; j < k; j++) {
            if (place[n * k + j] >= rows) continue;
            const float *of_row = y + place[n * k + j] * width;
            for (int64_t i = 0; i < width; i++) of_token[i] += of_row[i];
        }
    }
}
