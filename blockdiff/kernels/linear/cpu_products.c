/* Products of fp32 matrices, many small ones in one call: each thread makes whole blocks of any of them.

   Lines of both sides are packed into panels, the right ones one after the other, and a block of ROWS x vectors of the
   result is made in registers. What is gathered is gathered on the way into panels. An element's sum is made in an order
   that the number of steps alone decides. */

#include <stdlib.h>

#include "cpu.h"
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__AVX512F__) || defined(__aarch64__) /* 32 registers */
#define ROWS 8
#else
#define ROWS 4
#endif
#define VECTORS 3             /* of a panel of the right side, at most */
#define WIDE (VECTORS * LANES)
#define DEEP 192              /* steps of a panel: the right one then fits into the first cache */
#define CHUNK 512             /* rows whose panels are made at once, at most, for the second cache */
#define LEAST 64              /* and at least */
#define GROUP (6 * WIDE)      /* columns that are made of them */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(4 * LANES)));

/* The loops over rows and vectors of a block must be gone for its sums to stay in registers. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* Whether the compiler knew fused products of long vectors, and how to share work out. */
void products_are_fast(int64_t *answer) {
#if defined(_OPENMP) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
    *answer = 1;
#else
    *answer = 0;
#endif
}

#ifdef __clang__
#define PAIRED(a, b, from) interleaved(a, b, from)
INLINE Vector interleaved(Vector a, Vector b, int from) {
    Vector both;
    for (int i = 0; i < LANES / 2; i++) both[2 * i] = a[from + i], both[2 * i + 1] = b[from + i];
    return both;
}
#else
#define PAIRED(a, b, from) __builtin_shuffle(a, b, (from) ? high : low)
#endif

/* Numbers of `lines` vectors (a power of two), which stand line by line: afterwards those of a step stand together. */
INLINE void turn(Vector *r, int lines) {
#ifndef __clang__
    Places low, high;
    for (int i = 0; i < LANES; i++) low[i] = i / 2 + i % 2 * LANES, high[i] = low[i] + LANES / 2;
#endif
    UNROLL for (int n = 1; n < lines; n *= 2) {
        Vector t[LANES];
        UNROLL for (int i = 0; i < lines / 2; i++) {
            t[2 * i] = PAIRED(r[i], r[i + lines / 2], 0);
            t[2 * i + 1] = PAIRED(r[i], r[i + lines / 2], LANES / 2);
        }
        UNROLL for (int i = 0; i < lines; i++) r[i] = t[i];
    }
}

static inline int64_t parts_of(int64_t size, int64_t most) { return (size + most - 1) / most; }

static inline int64_t place(const int64_t *token, int64_t n) { return token ? token[n] : n; }

/* A panel [steps][panel] of `lines` lines from `line` on, zeros beyond them. */
static void pack(const Lines *x, int64_t line, int64_t lines, int64_t step, int64_t steps, int64_t panel, float *to) {
    if (x->by_line == 1 && !x->line_token) {
        for (int64_t k = 0; k < steps; k++, to += panel) {
            const float *from = x->at + place(x->step_token, step + k) * x->by_step + line;
            if (lines < panel)
                for (int64_t i = 0; i < panel; i++) to[i] = i < lines ? from[i] : 0;
            else if (panel == ROWS)
                memcpy(to, from, ROWS * sizeof *to);
            else
                for (int64_t i = 0; i < panel; i += LANES) *(Vector *)(to + i) = *(const Vector *)(from + i);
        }
        return;
    }
    for (int64_t first = 0; first < panel; first += LANES) {
        const float *at[LANES];
        int64_t here = MIN(panel, LANES), k = 0;
        for (int64_t i = 0; i < here; i++) /* beyond the last line it stands again, until zeros are put there */
            at[i] = x->at + place(x->line_token, line + MIN(first + i, lines - 1)) * x->by_line;
        if (x->by_step == 1 && !x->step_token && panel >= LANES)
            for (; k + LANES <= steps; k += LANES) {
                Vector r[LANES];
                UNROLL for (int i = 0; i < LANES; i++) r[i] = *(const Vector *)(at[i] + step + k);
                turn(r, LANES);
                UNROLL for (int i = 0; i < LANES; i++) *(Vector *)(to + (k + i) * panel + first) = r[i];
            }
        else if (x->by_step == 1 && !x->step_token)
            for (; k + LANES <= steps; k += LANES) {
                Vector r[ROWS];
                UNROLL for (int i = 0; i < ROWS; i++) r[i] = *(const Vector *)(at[i] + step + k);
                turn(r, ROWS);
                UNROLL for (int i = 0; i < ROWS; i++) *(Vector *)(to + k * ROWS + i * LANES) = r[i];
            }
        for (; k < steps; k++)
            for (int64_t i = 0; i < here; i++)
                to[k * panel + first + i] = at[i][place(x->step_token, step + k) * x->by_step];
    }
    for (int64_t k = 0; lines < panel && k < steps; k++) memset(to + k * panel + lines, 0, (panel - lines) * sizeof *to);
}

/* A block of the result: `height` of `rows` rows, `width` columns of `vectors`. */
INLINE void make_block(const float *left, const float *right, int64_t steps, int rows, int vectors, float *out,
                       int64_t stride, int64_t height, int64_t width, int64_t adds) {
    Vector sum[ROWS][VECTORS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) {
            if (i < height) __builtin_prefetch(out + i * stride + v * LANES, 1);
            sum[i][v] = (Vector){0};
        }
    for (int64_t k = 0; k < steps; k++, left += ROWS, right += vectors * LANES) {
        Vector of_step[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) of_step[v] = *(const Vector *)(right + v * LANES);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int v = 0; v < vectors; v++) sum[i][v] += left[i] * of_step[v];
    }
    if (height == rows && width == vectors * LANES) {
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int v = 0; v < vectors; v++) {
                Vector *to = (Vector *)(out + i * stride + v * LANES);
                if (adds) sum[i][v] += *to;
                *to = sum[i][v];
            }
        return;
    }
    float edge[ROWS][WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) *(Vector *)(edge[i] + v * LANES) = sum[i][v];
    for (int64_t i = 0; i < height; i++, out += stride)
        for (int64_t j = 0; j < width; j++) out[j] = adds ? out[j] + edge[i][j] : edge[i][j];
}

static void add_block(const float *left, const float *right, int64_t steps, int vectors, float *out, int64_t stride,
                      int64_t height, int64_t width, int64_t adds) {
#define CASE(few, v)                                                                                                \
    case 4 * (few) + (v):                                                                                           \
        make_block(left, right, steps, ROWS / ((few) + 1), v, out, stride, height, width, adds);                    \
        break;
    switch (4 * (height <= ROWS / 2) + vectors) { CASE(0, 1) CASE(0, 2) CASE(0, 3) CASE(1, 1) CASE(1, 2) CASE(1, 3) }
#undef CASE
}

static __thread float *room; /* panels, kept by a thread from one product to the next */

void multiply_part(const Product *product, int64_t begin, int64_t end, int64_t first_column, int64_t last_column) {
    int64_t first = first_column / LANES, last = parts_of(last_column, LANES);
    if (!room && !(room = aligned_alloc(64, (CHUNK + WIDE) * DEEP * sizeof *room))) abort();
    float *right = room, *left = room + WIDE * DEEP, *out = product->out + begin * product->stride;
    int64_t panels = parts_of(last - first, VECTORS), adds = product->adds, stride = product->stride;
    for (const Product *p = product; p; p = p->more) {
        int64_t depths = parts_of(p->steps, DEEP);
        for (int64_t depth = 0; depth < depths; depth++, adds = 1) {
            int64_t step = p->steps * depth / depths, steps = p->steps * (depth + 1) / depths - step;
            for (int64_t r = begin; r < end; r += ROWS)
                pack(&p->left, r, MIN(ROWS, end - r), step, steps, ROWS, left + (r - begin) * steps);
            for (int64_t j = 0; j < panels; j++) {
                int64_t v = first + (last - first) * j / panels, column = v * LANES;
                int64_t panel = (first + (last - first) * (j + 1) / panels) * LANES - column;
                int64_t width = MIN(panel, product->columns - column);
                pack(&p->right, column, width, step, steps, panel, right);
                for (int64_t r = 0; r < end - begin; r += ROWS)
                    add_block(left + r * steps, right, steps, panel / LANES, out + r * stride + column, stride,
                              MIN(ROWS, end - begin - r), width, adds);
            }
        }
    }
    int64_t column = first * LANES, width = MIN(last * LANES, product->columns) - column;
    for (int64_t r = begin; r < end && !adds; r++, out += stride) memset(out + column, 0, width * sizeof *out);
}

void multiply(const Product *products, int64_t count) {
    int64_t tasks, work = 0, chunk_rows = 2 * CHUNK;
    for (const Product *p = products; p < products + count; p++)
        for (const Product *each = p; each; each = each->more) work += p->rows * p->columns * each->steps;
    do { /* enough tasks that no thread waits long for another */
        chunk_rows /= 2, tasks = 0;
        for (const Product *p = products; p < products + count; p++)
            tasks += parts_of(p->rows, chunk_rows) * parts_of(p->columns, GROUP);
    } while (tasks < 2 * omp_get_max_threads() && chunk_rows > LEAST);
#pragma omp parallel for schedule(dynamic) if (work > MUCH * 16)
    for (int64_t task = 0; task < tasks; task++) {
        const Product *p = products;
        int64_t left = task, chunks, groups;
        for (;; left -= chunks * groups, p++) {
            chunks = parts_of(p->rows, chunk_rows), groups = parts_of(p->columns, GROUP);
            if (left < chunks * groups) break;
        }
        int64_t chunk = left / groups, group = left % groups, vectors = parts_of(p->columns, LANES);
        int64_t blocks = parts_of(p->rows, ROWS), end = MIN(p->rows, blocks * (chunk + 1) / chunks * ROWS);
        int64_t from = vectors * group / groups * LANES, to = MIN(vectors * (group + 1) / groups * LANES, p->columns);
        multiply_part(p, blocks * chunk / chunks * ROWS, end, from, to);
    }
}
