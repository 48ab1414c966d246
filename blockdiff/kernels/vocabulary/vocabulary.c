/* The steps after the product of hidden states and table, row by row and in place. Cap 0: no cap. */

#include "loops.h"

/* tanh: a polynomial for small numbers (Cephes' tanhf), so that the relative error stays that of fp32. */
static inline float tanh_of(float x) {
    float size = x < 0 ? -x : x, square = x * x;
    float p = -5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    float small = p * square * x + x, large = 1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f);
    return size < 0.625f ? small : x < 0 ? -large : large;
}

static inline float peak_of(const float *x, int64_t width) {
    float peak = -INFINITY;
#pragma omp simd reduction(max : peak)
    for (int64_t i = 0; i < width; i++) peak = x[i] > peak ? x[i] : peak;
    return peak;
}

static inline void cap_row(float *z, int64_t width, float cap, float factor) {
    float inverse = 1.0f / cap;
    if (cap > 0) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) z[i] = cap * tanh_of(z[i] * inverse) * factor;
    } else if (factor != 1.0f) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) z[i] *= factor;
    }
}

static inline float slope_of(float z, float cap) { return cap > 0 ? 1.0f - (z / cap) * (z / cap) : 1.0f; }

/* Loss and normaliser of every row; z becomes total * dloss/dz if `wants_gradient`, else it is undefined.

   observed and bonus may be NULL. Capped logits are in [-cap, cap], so for caps up to 40 no maximum is subtracted. */
void cross_entropy(float *z, int64_t rows, int64_t width, const int64_t *target, float cap, const int64_t *observed,
                   const float *bonus, int64_t wants_gradient, float *loss, float *total) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        float *x = z + r * width;
        if (target[r] < 0 || target[r] >= width || (observed && (observed[r] < 0 || observed[r] >= width))) {
            loss[r] = total[r] = NAN; /* not a token of the table */
            continue;
        }
        cap_row(x, width, cap, 1.0f);
        float of_target = x[target[r]], of_observed = observed ? x[observed[r]] : 0;
        float peak = cap > 0 && cap <= 40 ? 0 : peak_of(x, width), sum = 0, inverse = cap > 0 ? 1.0f / cap : 0;
        if (wants_gradient) {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++) {
                float e = exp_of(x[i] - peak), t = x[i] * inverse;
                sum += e;
                x[i] = e * (1.0f - t * t);
            }
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++) sum += exp_of(x[i] - peak);
        }
        float e_target = exp_of(of_target - peak), above = 0;
        if (observed) {
            float e = exp_of(of_observed - peak), more = e * expm1f(bonus[r]);
            sum += more;
            if (wants_gradient) x[observed[r]] = (e + more) * slope_of(of_observed, cap);
            if (observed[r] == target[r]) e_target += more, above = bonus[r];
        }
        if (wants_gradient) x[target[r]] = (e_target - sum) * slope_of(of_target, cap);
        loss[r] = logf(sum) + peak - of_target - above;
        total[r] = sum;
    }
}

static inline float softmax_row(float *x, int64_t width, float peak) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) {
        x[i] = exp_of(x[i] - peak);
        sum += x[i];
    }
    float inverse = 1.0f / sum;
    for (int64_t i = 0; i < width; i++) x[i] *= inverse;
    return sum;
}

/* Replace z by softmax(capped z * factor), factor = 1 / T. */
void capped_softmax(float *z, int64_t rows, int64_t width, float cap, float factor) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        cap_row(z + r * width, width, cap, factor);
        softmax_row(z + r * width, width, peak_of(z + r * width, width));
    }
}

/* capped_softmax with the statistics of a denoising step; factor: one for all rows (step 0) or one each (step 1).

   A sample is the first token at which the cumulative probability exceeds `uniform`; argmax ties go to the lower.
   The log-probability is that of the sample; the best token's is by the logits without the factor. allowed: of each row (line 0 apart: one for all) a bit for every token, 32
   to a word; no memory where all are. */
void token_stats(float *z, int64_t rows, int64_t width, float cap, const float *factor, int64_t step,
                 const float *uniform, const int32_t *allowed, int64_t line, float *entropy, int64_t *argmax,
                 int64_t *sample, float *log_probability, float *best_log_probability) {
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        float *x = z + r * width;
        cap_row(x, width, cap, factor[r * step]);
        for (int64_t i = 0; allowed && i < width; i++)
            if (!((uint32_t)allowed[r * line + i / 32] >> i % 32 & 1)) x[i] = -INFINITY;
        float peak = peak_of(x, width), expected = 0, sum = 0, own = 0, temperature = 1.0f / factor[r * step];
        int64_t best = 0;
        while (best + 1 < width && x[best] != peak) best++;
        int64_t chosen = best;
        if (temperature != 1.0f) {
#pragma omp simd reduction(+ : own)
            for (int64_t i = 0; i < width; i++) own += exp_of((x[i] - peak) * temperature);
        }
#pragma omp simd reduction(+ : expected, sum)
        for (int64_t i = 0; i < width; i++) {
            float e = exp_of(x[i] - peak), weighted = e > 0 ? e * (x[i] - peak) : e;
            x[i] = e;
            sum += e;
            expected += weighted;
        }
        best_log_probability[r] = -logf(temperature == 1.0f ? sum : own);
        double all = 0, so_far = 0;
        for (int64_t i = 0; i < width; i++) all += x[i];
        double threshold = uniform[r] * all;
        for (int64_t i = 0; i < width; i++) {
            so_far += x[i];
            if (so_far > threshold) {
                chosen = i;
                break;
            }
        }
        entropy[r] = logf(sum) - expected / sum;
        argmax[r] = best;
        sample[r] = chosen;
        log_probability[r] = logf(x[chosen]) - logf(sum);
        float inverse = 1.0f / sum;
        for (int64_t i = 0; i < width; i++) x[i] *= inverse;
    }
}
