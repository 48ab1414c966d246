/* Products of small fp32 matrices with the sums in registers, for the blocks of attention and for experts. */

#include "loops.h"

#if defined(__AVX512F__)
#define WIDTH 16 /* numbers of a vector */
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define IS_ROOMY 1 /* 32 vector registers, not 16 */
#else
#define IS_ROOMY 0
#endif

#define LANES 48 /* rows of queries computed together; a multiple of every tile height below */
#define INLINE static inline __attribute__((always_inline))
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < n; i++)

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef float Loose __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias)); /* a vector at any address */
typedef int32_t Places __attribute__((vector_size(4 * WIDTH)));

/* Set (or add to) `rows` (at most R) lines of W vectors of c the product a b. Element (r, s) of a is
   a[r * by_row + s * by_step]; all R rows of a are read. */
#define TILE(R, W)                                                                                                    \
    INLINE void tile_##R##_##W(const float *a, int64_t by_row, int64_t by_step, const float *b, int64_t b_line,      \
                               int64_t steps, float *c, int64_t c_line, int64_t rows, int adds) {                    \
        Vector sums[R][W];                                                                                            \
        EACH(r, R) EACH(w, W) {                                                                                       \
            sums[r][w] = (Vector){0};                                                                                 \
            if (adds && r < rows) sums[r][w] = *(const Loose *)(c + r * c_line + w * WIDTH);                          \
        }                                                                                                             \
        for (int64_t s = 0; s < steps; s++) {                                                                         \
            Vector line[W];                                                                                           \
            EACH(w, W) line[w] = *(const Loose *)(b + s * b_line + w * WIDTH);                                        \
            EACH(r, R) {                                                                                              \
                Vector x = a[r * by_row + s * by_step] - (Vector){0};                                                 \
                EACH(w, W) sums[r][w] += x * line[w];                                                                 \
            }                                                                                                         \
        }                                                                                                             \
        EACH(r, R) if (r < rows) EACH(w, W) *(Loose *)(c + r * c_line + w * WIDTH) = sums[r][w];                      \
    }

TILE(1, 1)
TILE(6, 1)
TILE(8, 1)
TILE(12, 1)
TILE(1, 2)
TILE(6, 2)
#if IS_ROOMY
TILE(8, 2)
TILE(12, 2)
TILE(1, 3)
TILE(4, 3)
TILE(8, 3)
TILE(3, 4)
TILE(6, 4)
#else
TILE(3, 2)
#endif

#define SCORES(R, W)                                                                                                  \
    for (int64_t n = 0; n < keys; n += keys < R ? 1 : R) {                                                            \
        int64_t at = keys < R ? n : MIN(n, keys - R); /* the last tile repeats some rows to stay inside */            \
        if (keys < R)                                                                                                 \
            tile_1_##W(k + at * line, line, 1, lanes + l, LANES, dim, out + at * LANES + l, LANES, 1, 0);             \
        else                                                                                                          \
            tile_##R##_##W(k + at * line, line, 1, lanes + l, LANES, dim, out + at * LANES + l, LANES, R, 0);         \
    }                                                                                                                 \
    l += W * WIDTH

/* out [keys, LANES] = k [keys, dim] (keys or values, `line` numbers apart) times lanes [dim, LANES]. */
static void product_scores(const float *k, int64_t line, int64_t keys, const float *lanes, int64_t width, int64_t dim,
                           float *out) {
    for (int64_t l = 0; l < width;) {
#if IS_ROOMY
        if (width - l >= 3 * WIDTH) {
            SCORES(8, 3);
        } else if (width - l >= 2 * WIDTH) {
            SCORES(8, 2);
#else
        if (width - l >= 2 * WIDTH) {
            SCORES(6, 2);
#endif
        } else {
            SCORES(8, 1);
        }
    }
}

#define COLUMN(R, W)                                                                                                  \
    tile_##R##_##W(a + r * by_row, by_row, by_step, b + x, b_line, steps, c + r * c_line + x, c_line, rows - r, adds)
#define COLUMNS(R, HALF, W)                                                                                           \
    for (int64_t r = 0; r < rows; r += R)                                                                             \
        if (rows - r > HALF)                                                                                          \
            COLUMN(R, W);                                                                                             \
        else                                                                                                          \
            COLUMN(HALF, W);                                                                                          \
    x += W * WIDTH

/* c [rows, dim] += a b, or = a b; up to 11 rows of a beyond those of c are read. */
INLINE void product(const float *a, int64_t by_row, int64_t by_step, int64_t rows, const float *b, int64_t b_line,
                    int64_t steps, float *c, int64_t c_line, int64_t dim, int adds) {
    for (int64_t x = 0; x < dim;) {
#if IS_ROOMY
        if (dim - x >= 4 * WIDTH) {
            COLUMNS(6, 3, 4);
        } else if (dim - x >= 3 * WIDTH) {
            COLUMNS(8, 4, 3);
        } else if (dim - x >= 2 * WIDTH) {
            COLUMNS(12, 6, 2);
#else
        if (dim - x >= 2 * WIDTH) {
            COLUMNS(6, 3, 2);
#endif
        } else {
            COLUMNS(12, 6, 1);
        }
    }
}

/* out [rows, dim] = weights [keys, LANES] transposed times v [keys, dim] (values or keys, `line` numbers apart). */
static void product_rows(const float *weights, int64_t rows, const float *v, int64_t line, int64_t keys, float *out,
                         int64_t dim, int adds) {
    product(weights, 1, LANES, rows, v, line, keys, out, dim, dim, adds);
}

/* Swap stretches of `step` numbers of two lines: the later ones of the first with the earlier ones of the second. */
#define LOW(step, l) (((l) & (step) ? WIDTH + (l) - (step) : (l)) & (2 * WIDTH - 1))
#define HIGH(step, l) (((l) & (step) ? WIDTH + (l) : (l) + (step)) & (2 * WIDTH - 1))
#define FOUR(WHICH, step, l) WHICH(step, l), WHICH(step, l + 1), WHICH(step, l + 2), WHICH(step, l + 3)
#if WIDTH == 16
#define ALL(WHICH, step) FOUR(WHICH, step, 0), FOUR(WHICH, step, 4), FOUR(WHICH, step, 8), FOUR(WHICH, step, 12)
#elif WIDTH == 8
#define ALL(WHICH, step) FOUR(WHICH, step, 0), FOUR(WHICH, step, 4)
#else
#define ALL(WHICH, step) FOUR(WHICH, step, 0)
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif
#define EXCHANGE(step)                                                                                                \
    if (step < WIDTH) EACH(i, WIDTH) if (!(i & step)) {                                                               \
        Vector a = line[i], b = line[i | step];                                                                       \
        line[i] = SHUFFLE(a, b, ALL(LOW, step));                                                                      \
        line[i | step] = SHUFFLE(a, b, ALL(HIGH, step));                                                              \
    }

/* out [dim, LANES] = rows [width, dim], given by the pointers `at`, transposed and times `scale`. */
static void transpose_rows(const float *const *at, int64_t width, int64_t dim, float scale, float *out) {
    for (int64_t l = 0; l < width; l += WIDTH)
        for (int64_t x = 0; x < dim; x += WIDTH) {
            Vector line[2 * WIDTH]; /* the second half only silences the compiler: steps beyond the width do nothing */
            EACH(i, WIDTH) line[i] = *(const Loose *)(at[l + i] + x) * scale;
            EXCHANGE(1)
            EXCHANGE(2)
            EXCHANGE(4)
            EXCHANGE(8)
            EACH(i, WIDTH) *(Loose *)(out + (x + i) * LANES + l) = line[i];
        }
}
