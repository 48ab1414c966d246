/* The products of rows with the matrix of their expert, and the gradients of these matrices, whose sides are multiples
   of 16. A task is a panel of columns of one expert; every sum is made in the order of its steps. */

#include "products.h"

#define DEEP 256 /* steps of a panel */
#define EDGE 24  /* every number of rows of a tile divides it */

/* c [rows, columns] = a b, or that is added; no more of a is read than there is, which `product` does. */
static void product_inside(const float *a, int64_t by_row, int64_t by_step, int64_t rows, const float *b, int64_t b_line,
                           int64_t steps, float *c, int64_t c_line, int64_t columns, int adds) {
    int64_t whole = rows / EDGE * EDGE;
    float edge[EDGE * DEEP];
    product(a, by_row, by_step, whole, b, b_line, steps, c, c_line, columns, adds);
    if (whole == rows) return;
    memset(edge, 0, sizeof edge);
    for (int64_t s = 0; s < steps; s++)
        for (int64_t r = whole; r < rows; r++) edge[(r - whole) * DEEP + s] = a[r * by_row + s * by_step];
    product(edge, DEEP, 1, rows - whole, b, b_line, steps, c + whole * c_line, c_line, columns, adds);
}

/* out [M, wide] = rows x [M, depth] times their expert's matrix, whose element (step, column) stands at
   step * by_step + column * by_column; one of these is 1. */
void grouped_product(const float *x, const int32_t *ends, int64_t experts, int64_t depth, const float *weights,
                     int64_t apart, int64_t by_step, int64_t by_column, int64_t wide, float *out) {
#pragma omp parallel for collapse(2) schedule(dynamic) if (ends[experts - 1] * wide * depth > MUCH * 16)
    for (int64_t e = 0; e < experts; e++)
        for (int64_t column = 0; column < wide; column += LANES) {
            int64_t begin = e ? ends[e - 1] : 0, rows = ends[e] - begin, columns = MIN(LANES, wide - column);
            for (int64_t step = 0; step < depth && rows; step += DEEP) {
                int64_t steps = MIN(DEEP, depth - step), line = by_step;
                const float *panel = weights + e * apart + step * by_step + column * by_column, *lines[LANES];
                float turned[DEEP * LANES] __attribute__((aligned(64)));
                if (by_step == 1) {
                    for (int64_t i = 0; i < columns; i++) lines[i] = panel + i * by_column;
                    transpose_rows(lines, columns, steps, 1.0f, turned);
                    panel = turned, line = LANES;
                }
                product_inside(x + begin * depth + step, depth, 1, rows, panel, line, steps, out + begin * wide + column,
                               wide, columns, step > 0);
            }
        }
}

/* `count` numbers in NVFP4, a multiple of 16, of a row with this scale. tables: the two numbers of each byte of codes,
   and the number of each byte of e4m3. */
static void decode(const uint8_t *codes, const uint8_t *blocks, float scale, int64_t count, const float *tables,
                   float *out) {
    for (int64_t x = 0; x < count; x += 16) {
        float of_block = tables[512 + blocks[x / 16]];
        for (int64_t i = 0; i < 8; i++) memcpy(out + x + 2 * i, tables + 2 * codes[x / 2 + i], 2 * sizeof *out);
        for (int64_t i = 0; i < 16; i++) out[x + i] = out[x + i] * of_block * scale;
    }
}

/* As grouped_product with matrices in NVFP4, decoded panel by panel: codes [experts, lines, length / 2] with block
   scales [experts, lines, length / 16] and scales [experts, lines]. turned: lines are columns, and not steps. */
void grouped_product_nvfp4(const float *x, const int32_t *ends, int64_t experts, int64_t depth, const uint8_t *codes,
                           const uint8_t *blocks, const float *scales, const float *tables, int64_t turned,
                           int64_t wide, float *out) {
    int64_t lines = turned ? wide : depth, length = turned ? depth : wide;
#pragma omp parallel for collapse(2) schedule(dynamic) if (ends[experts - 1] * wide * depth > MUCH * 16)
    for (int64_t e = 0; e < experts; e++)
        for (int64_t column = 0; column < wide; column += LANES) {
            int64_t begin = e ? ends[e - 1] : 0, rows = ends[e] - begin, columns = MIN(LANES, wide - column);
            for (int64_t step = 0; step < depth && rows; step += DEEP) {
                int64_t steps = MIN(DEEP, depth - step), first = turned ? column : step, at = turned ? step : column;
                float panel[DEEP * LANES] __attribute__((aligned(64))), decoded[DEEP * LANES];
                const float *own[LANES];
                for (int64_t i = 0; i < (turned ? columns : steps); i++) {
                    int64_t line = e * lines + first + i, count = turned ? steps : columns;
                    float *to = turned ? decoded + i * DEEP : panel + i * LANES;
                    decode(codes + (line * length + at) / 2, blocks + (line * length + at) / 16, scales[line], count,
                           tables, to);
                    if (turned) own[i] = to;
                }
                if (turned) transpose_rows(own, columns, steps, 1.0f, panel);
                product_inside(x + begin * depth + step, depth, 1, rows, panel, LANES, steps,
                               out + begin * wide + column, wide, columns, step > 0);
            }
        }
}

/* Per expert left [M, wide] transposed times right [M, depth]: out [experts, wide, depth]. */
void grouped_outer_product(const float *left, const float *right, const int32_t *ends, int64_t experts, int64_t wide,
                           int64_t depth, float *out) {
#pragma omp parallel for collapse(2) schedule(dynamic) if (ends[experts - 1] * wide * depth > MUCH * 16)
    for (int64_t e = 0; e < experts; e++)
        for (int64_t column = 0; column < depth; column += LANES) {
            int64_t begin = e ? ends[e - 1] : 0, end = ends[e], columns = MIN(LANES, depth - column);
            float *to = out + e * wide * depth + column;
            for (int64_t row = 0; row < wide && begin == end; row++) memset(to + row * depth, 0, columns * sizeof *to);
            for (int64_t step = begin; step < end; step += DEEP)
                product_inside(left + step * wide, 1, wide, wide, right + step * depth + column, depth,
                               MIN(DEEP, end - step), to, depth, columns, step > begin);
        }
}
