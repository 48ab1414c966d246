/* Products of matrices by the tile unit (AMX) of x86 processors; where there is none nothing here is called.

   The unit multiplies bf16 numbers and adds up in fp32: inputs are fp32 and rounded to bf16 on their way into tiles,
   results are fp32 and never rounded. Every element of a result is summed in an order that the depth of the product
   alone decides. */

#include <stdlib.h>

#include "cpu.h"

#if defined(__linux__) && defined(__x86_64__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#endif

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */
#define TILE 512                  /* numbers of a tile of 16 lines x 32 steps */
#define SIDE 32                   /* lines of a panel: two tiles */
#define DEEP 256                  /* steps of a panel */
#define STEP (2 * TILE)           /* numbers of a panel for 32 steps */
#define PANEL (DEEP / 32 * STEP)
#define PANELS 16                 /* panels of the right side that are made at once: 256 KiB, for the second cache */
#define PARTS 3

/* Whether this machine has the unit and the system lets this process use it. */
void tiles_are_there(int64_t *answer) { *answer = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }

/* Numbers x(line, step): lines are rows or columns of the result, steps are what is summed over. One stride is 1. */
typedef struct {
    const float *at;
    int64_t line, step, lines;
} Side;

/* The right side of a product, and where the columns that it makes stand, in lines of `stride` elements. */
typedef struct {
    Side right;
    float *out;
    int64_t stride;
} Part;

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Eight tiles of 16 rows of 64 bytes; what was set before, for others may count on it. */
static TileConfig configured(void) {
    TileConfig before, mine = {.palette = 1};
    for (int t = 0; t < 8; t++) mine.bytes[t] = 64, mine.rows[t] = 16;
    _tile_storeconfig(&before);
    _tile_loadconfig(&mine);
    return before;
}

static void give_back(TileConfig before) {
    if (before.palette)
        _tile_loadconfig(&before);
    else
        _tile_release();
}

/* 16 x 16 numbers of 32 bits. */
static inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

static inline __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : n > 0 ? (1u << n) - 1 : 0; }

/* Numbers rounded to bf16, each in the lower half of a word. */
static inline __m512i rounded(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

/* One tile: [line][pair of steps], or [pair][line] for the right side; beyond the edges 0. */
static inline void pack_tile(Side x, int64_t line, int64_t step, int64_t steps, int is_right, uint16_t *out) {
    __m512i made[16];
    int64_t lines = x.lines - line, left = steps - step;
    int by_line = x.step == 1;
    for (int i = 0; i < 16; i++) {
        __m512 a = _mm512_setzero_ps(), b = a;
        if (by_line) { /* 32 steps of a line, as they stand */
            const float *at = x.at + (line + i) * x.line + step;
            if (i < lines) a = _mm512_maskz_loadu_ps(first(left), at), b = _mm512_maskz_loadu_ps(first(left - 16), at + 16);
            made[i] = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        } else { /* two steps of 16 lines, in pairs */
            const float *at = x.at + (step + 2 * i) * x.step + line;
            if (2 * i < left) a = _mm512_maskz_loadu_ps(first(lines), at);
            if (2 * i + 1 < left) b = _mm512_maskz_loadu_ps(first(lines), at + x.step);
            made[i] = _mm512_or_si512(rounded(a), _mm512_slli_epi32(rounded(b), 16));
        }
    }
    if (by_line == is_right) transpose(made);
    for (int i = 0; i < 16; i++) _mm512_store_si512(out + i * 32, made[i]);
}

static inline void pack_panel(Side x, int64_t line, int64_t step, int64_t steps, int is_right, uint16_t *out) {
    for (int64_t k = step; k < MIN(step + DEEP, steps); k += 32, out += STEP)
        for (int half = 0; half < 2; half++)
            pack_tile(x, line + 16 * half, k, steps, is_right, out + half * TILE);
}

/* The compiler does not know that tiles read memory. */
#define FENCE() __asm__ volatile("" ::: "memory")

/* Add the product of two panels to the 32 x 32 numbers of tiles 0 to 3. */
static inline void add_product(const uint16_t *left, const uint16_t *right, int64_t depth) {
    FENCE();
    for (int64_t k = 0; k < depth; k++, left += STEP, right += STEP) {
        _tile_loadd(6, right, 64);
        _tile_loadd(7, right + TILE, 64);
        _tile_loadd(4, left, 64);
        _tile_loadd(5, left + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

static void load_block(const float *at, int64_t stride) {
    FENCE();
    _tile_loadd(0, at, stride * 4);
    _tile_loadd(1, at + 16, stride * 4);
    _tile_loadd(2, at + 16 * stride, stride * 4);
    _tile_loadd(3, at + 16 * stride + 16, stride * 4);
}

static void store_block(float *at, int64_t stride) {
    _tile_stored(0, at, stride * 4);
    _tile_stored(1, at + 16, stride * 4);
    _tile_stored(2, at + 16 * stride, stride * 4);
    _tile_stored(3, at + 16 * stride + 16, stride * 4);
    FENCE();
}

static inline void copy_block(float *to, int64_t to_stride, const float *from, int64_t stride, int64_t rows,
                              int64_t width) {
    for (int64_t r = 0; r < rows; r++) memcpy(to + r * to_stride, from + r * stride, width * sizeof *to);
}

/* A block of the result: columns from `column` on of a part. */
static inline void make_block(const uint16_t *left, const uint16_t *right, int64_t depth, Part part,
                              int64_t row, int64_t rows, int64_t column, int adds) {
    float edge[SIDE * SIDE] __attribute__((aligned(64)));
    float *out = part.out + row * part.stride + column, *to = out;
    int64_t width = MIN(part.right.lines - column, SIDE), stride = part.stride;
    int is_edge = rows < SIDE || width < SIDE;
    if (is_edge) {
        to = edge, stride = SIDE;
        if (adds) copy_block(edge, SIDE, out, part.stride, rows, width);
    }
    if (adds)
        load_block(to, stride);
    else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    add_product(left, right, depth);
    store_block(to, stride);
    if (is_edge) copy_block(out, part.stride, edge, SIDE, rows, width);
}

static __thread uint16_t *room; /* the panels of the right side, kept by a thread from one product to the next */

/* out = left right^T of every part, or that is added to it. Without steps there is nothing to add. */
static void product(Side left, const Part *parts, int count, int64_t steps, int adds) {
    int64_t rows = left.lines, panels = (rows + SIDE - 1) / SIDE, all = 0, width = 0;
    for (int p = 0; p < count; p++) all += (parts[p].right.lines + SIDE - 1) / SIDE, width += parts[p].right.lines;
    if (!room && !(room = aligned_alloc(64, PANELS * PANEL * sizeof *room))) abort();
    uint16_t *right = room;
    for (int64_t step = 0; step < steps; step += DEEP)
        for (int64_t from = 0; from < all; from += PANELS) {
            int64_t here = MIN(all - from, PANELS), depth = (MIN(steps - step, DEEP) + 31) / 32;
            /* few panels of rows are shared out by columns, too */
            int64_t shares = panels < 8 && omp_get_max_threads() > 1 ? MIN(here, 4) : 1;
#pragma omp parallel if (rows * width * steps > MUCH * 16)
            {
                TileConfig before = configured();
                uint16_t mine[PANEL] __attribute__((aligned(64)));
#pragma omp for schedule(static)
                for (int64_t j = 0; j < here; j++) {
                    int64_t panel = from + j;
                    const Part *part = parts;
                    for (; panel >= (part->right.lines + SIDE - 1) / SIDE; part++)
                        panel -= (part->right.lines + SIDE - 1) / SIDE;
                    pack_panel(part->right, panel * SIDE, step, steps, 1, right + j * PANEL);
                }
#pragma omp for schedule(static)
                for (int64_t task = 0; task < panels * shares; task++) {
                    int64_t row = task / shares * SIDE, share = task % shares;
                    pack_panel(left, row, step, steps, 0, mine);
                    for (int64_t j = here * share / shares; j < here * (share + 1) / shares; j++) {
                        int64_t panel = from + j;
                        const Part *part = parts;
                        for (; panel >= (part->right.lines + SIDE - 1) / SIDE; part++)
                            panel -= (part->right.lines + SIDE - 1) / SIDE;
                        make_block(mine, right + j * PANEL, depth, *part, row, MIN(rows - row, SIDE),
                                   panel * SIDE, adds || step > 0);
                    }
                }
                give_back(before);
            }
        }
}

/* x [rows, depth] times each weight [wide, depth], transposed; a weight of no width is none. */
void linear(const float *x, int64_t rows, int64_t depth, const float *weight_0, int64_t wide_0,
            float *out_0, const float *weight_1, int64_t wide_1, float *out_1, const float *weight_2, int64_t wide_2,
            float *out_2) {
    Side left = {x, depth, 1, rows};
    Part parts[PARTS] = {{{weight_0, depth, 1, wide_0}, out_0, wide_0},
                         {{weight_1, depth, 1, wide_1}, out_1, wide_1},
                         {{weight_2, depth, 1, wide_2}, out_2, wide_2}};
    product(left, parts, PARTS, depth, 0);
}

/* grad [rows, wide] times weight [wide, depth]: written, or added to what others gave. */
void linear_backward_x(const float *grad, int64_t rows, int64_t wide, const float *weight,
                       int64_t depth, int64_t adds, float *grad_x) {
    Side left = {grad, wide, 1, rows};
    Part part = {{weight, 1, depth, depth}, grad_x, depth};
    product(left, &part, 1, wide, adds);
}

/* The gradient of a weight: grad [rows, wide] transposed times x [rows, depth]. */
void linear_backward_weight(const float *grad, int64_t rows, int64_t wide, const float *x,
                            int64_t depth, float *grad_weight) {
    Side left = {grad, 1, wide, wide};
    Part part = {{x, 1, depth, depth}, grad_weight, depth};
    if (rows == 0) memset(grad_weight, 0, wide * depth * sizeof *grad_weight);
    product(left, &part, 1, rows, 0);
}

/* Rows of x [M, depth] times the matrix of their expert, which holds element (d, w) at d * by_depth + w * by_width. */
void linear_grouped(const float *x, const int32_t *ends, int64_t experts, int64_t depth,
                    const float *weights, int64_t apart, int64_t by_depth, int64_t by_width, int64_t wide, float *out) {
    for (int64_t e = 0, begin = 0; e < experts; begin = ends[e++]) {
        Side left = {x + begin * depth, depth, 1, ends[e] - begin};
        Part part = {{weights + e * apart, by_width, by_depth, wide}, out + begin * wide, wide};
        if (begin < ends[e]) product(left, &part, 1, depth, 0);
    }
}

/* Per expert left [M, wide] transposed times right [M, depth]: the gradients of their matrices. */
void linear_grouped_backward(const float *left, const int32_t *ends, int64_t experts, int64_t wide,
                             const float *right, int64_t depth, float *grads) {
    for (int64_t e = 0, begin = 0; e < experts; begin = ends[e++])
        linear_backward_weight(left + begin * wide, ends[e] - begin, wide, right + begin * depth, depth,
                               grads + e * wide * depth);
}

#else

void tiles_are_there(int64_t *answer) { *answer = 0; }

#endif
