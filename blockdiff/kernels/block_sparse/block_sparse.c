/* What stands between the products of block-sparse attention and of its selection: gathered rows, softmax, merging. */

#include "loops.h"

/* -- attention: `count` queries of a chunk that chose one block, each with `group` heads ------------------------- */

/* to[n] = from[rows[n]], rows of `width` numbers. */
void sparse_gather(const float *from, const int64_t *rows, int64_t count, int64_t width, float *to) {
#pragma omp parallel for schedule(static) if (count * width > MUCH)
    for (int64_t n = 0; n < count; n++) memcpy(to + n * width, from + rows[n] * width, width * sizeof *to);
}

/* to[rows[n]] += from[n], rows of `width` numbers; no row comes twice. */
void sparse_scatter(const float *from, const int64_t *rows, int64_t count, int64_t width, float *to) {
#pragma omp parallel for schedule(static) if (count * width > MUCH)
    for (int64_t n = 0; n < count; n++) {
        float *into = to + rows[n] * width;
        const float *x = from + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) into[i] += x[i];
    }
}

/* How many of a block's keys a query sees; `begin`: the block's first key, counted as `visible` counts. */
static inline int64_t seen_of(const int64_t *visible, int64_t row, int64_t begin, int64_t keys) {
    return MAX(0, MIN(keys, visible[row] - begin));
}

/* scores [count * group, keys] become weights under the highest score so far, `peak` [chunk, group], with which sums
   `total` go on; kept [count * group]: what is left of a weight made before. */
void sparse_softmax(float *scores, const int64_t *rows, const int64_t *visible, int64_t begin, int64_t count,
                    int64_t group, int64_t keys, float *peak, float *total, float *kept) {
#pragma omp parallel for schedule(static) if (count * group * keys > MUCH)
    for (int64_t r = 0; r < count * group; r++) {
        float *x = scores + r * keys, high = -INFINITY, sum = 0;
        int64_t row = rows[r / group], at = row * group + r % group, seen = seen_of(visible, row, begin, keys);
#pragma omp simd reduction(max : high)
        for (int64_t i = 0; i < seen; i++) high = x[i] > high ? x[i] : high;
        float old = peak[at];
        high = high > old ? high : old;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < seen; i++) {
            x[i] = exp_of(x[i] - high);
            sum += x[i];
        }
        for (int64_t i = seen; i < keys; i++) x[i] = 0;
        kept[r] = old == high ? 1.0f : exp_of(old - high);
        peak[at] = high;
        total[at] = total[at] * kept[r] + sum;
    }
}

/* acc[rows[n]] = acc[rows[n]] * kept[n] + gained[n], for `group` heads of d numbers. */
void sparse_merge(float *acc, const float *gained, const float *kept, const int64_t *rows, int64_t count,
                  int64_t group, int64_t d) {
#pragma omp parallel for schedule(static) if (count * group * d > MUCH)
    for (int64_t r = 0; r < count * group; r++) {
        float *into = acc + (rows[r / group] * group + r % group) * d, keep = kept[r];
        const float *x = gained + r * d;
#pragma omp simd
        for (int64_t i = 0; i < d; i++) into[i] = into[i] * keep + x[i];
    }
}

/* scores become weights, lse [chunk, group] known. */
void sparse_weights(float *scores, const int64_t *rows, const int64_t *visible, int64_t begin, int64_t count,
                    int64_t group, int64_t keys, const float *lse) {
#pragma omp parallel for schedule(static) if (count * group * keys > MUCH)
    for (int64_t r = 0; r < count * group; r++) {
        float *x = scores + r * keys;
        int64_t row = rows[r / group], seen = seen_of(visible, row, begin, keys);
        float shift = lse[row * group + r % group];
#pragma omp simd
        for (int64_t i = 0; i < seen; i++) x[i] = exp_of(x[i] - shift);
        for (int64_t i = seen; i < keys; i++) x[i] = 0;
    }
}

/* The gradient of the weights [count * group, keys] becomes that of the scores; dot [chunk, group]. */
void sparse_score_gradients(float *grad, const float *weights, const int64_t *rows, const float *dot, int64_t count,
                            int64_t group, int64_t keys) {
#pragma omp parallel for schedule(static) if (count * group * keys > MUCH)
    for (int64_t r = 0; r < count * group; r++) {
        float *g = grad + r * keys, shift = dot[rows[r / group] * group + r % group];
        const float *w = weights + r * keys;
#pragma omp simd
        for (int64_t i = 0; i < keys; i++) g[i] = (g[i] - shift) * w[i];
    }
}

/* -- selection: rows are `heads` index heads of each query ------------------------------------------------------- */

/* The scores [rows, blocks] of the blocks of products [rows, keys], from key `begin` on: the maximum or the
   log-sum-exp of a block's seen keys, or what is there already where none is seen. */
void sparse_block_scores(const float *products, const int64_t *visible, int64_t rows, int64_t heads, int64_t keys,
                         int64_t begin, int64_t block, int64_t uses_sum, float scale, float *scores, int64_t blocks) {
#pragma omp parallel for schedule(static) if (rows * keys > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        int64_t seen = MIN(keys, visible[r / heads] - begin);
        for (int64_t lo = 0; lo < seen; lo += block) {
            const float *x = products + r * keys + lo;
            int64_t count = MIN(block, seen - lo);
            float high = -INFINITY, sum = 0;
#pragma omp simd reduction(max : high)
            for (int64_t i = 0; i < count; i++) high = x[i] > high ? x[i] : high;
            float score = high * scale;
            if (uses_sum) {
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < count; i++) sum += exp_of((x[i] - high) * scale);
                score += logf(sum);
            }
            scores[r * blocks + (begin + lo) / block] = score;
        }
    }
}

/* A number that rises with the score; +0 and -0 are equal. */
static inline int64_t order_of(float score) {
    int32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits < 0 ? -((int64_t)bits + (1LL << 31)) : bits;
}

/* ids [rows, topk] of the blocks of scores [rows, blocks]: the first `init`, the last `local`, then the highest, of
   equal ones the lower; -1 where there is none. */
void sparse_choose(const float *scores, const int64_t *visible, int64_t rows, int64_t heads, int64_t blocks,
                   int64_t block, int64_t topk, int64_t init, int64_t local, int64_t *ids) {
#pragma omp parallel for schedule(static) if (rows * blocks > MUCH)
    for (int64_t r = 0; r < rows; r++) {
        const float *of = scores + r * blocks;
        int64_t *chosen = ids + r * topk, count = 0, there = (visible[r / heads] + block - 1) / block;
        int64_t lo = MIN(init, there), hi = MAX(lo, there - local);
        for (int64_t b = 0; b < lo && count < topk; b++) chosen[count++] = b;
        for (int64_t b = hi; b < there && count < topk; b++) chosen[count++] = b;
        int64_t forced = count;
        for (int64_t b = lo; b < hi && forced < topk; b++) {
            int64_t order = order_of(of[b]), place = count;
            if (count == topk && order <= order_of(of[chosen[topk - 1]])) continue;
            while (place > forced && order > order_of(of[chosen[place - 1]])) place--;
            count = MIN(count + 1, topk);
            for (int64_t i = count - 1; i > place; i--) chosen[i] = chosen[i - 1];
            chosen[place] = b;
        }
        for (int64_t i = count; i < topk; i++) chosen[i] = -1;
    }
}
