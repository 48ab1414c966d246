/* Products of matrices by the tile unit (AMX) of x86 processors; where there is none nothing here is called.

   The unit multiplies bf16 numbers and adds up in fp32. With one piece, numbers are rounded to bf16 on their way into
   tiles. With three pieces each number is the sum of three of bf16 (8 + 8 + 8 bits), which is exact but below about
   1e-33, and six of the nine products are made: what is left out is no larger than what fp32 rounds. Every element of
   a result is summed in an order that the depth of the product alone decides. Three pieces of a number that is not
   finite mean nothing: what is packed with one is multiplied by the vector unit. */

#include <stdlib.h>

#include "cpu.h"

#if defined(__linux__) && defined(__x86_64__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__AVX512DQ__)

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
#define STEPS 32                  /* steps of a tile */
#define DEEP 256                  /* steps of a panel, at most */
#define PIECES 3                  /* of a number, at most */
#define PANEL (DEEP / STEPS * PIECES * 2 * TILE)
#define LEFT 8   /* panels of rows that are made at once: with those of the columns they lie in the second cache */
#define RIGHT 16 /* panels of columns of a task, at most */
#define QUEUE 4  /* tile steps after which one tile is stored; without that a later store waits 300 ns */

/* Whether this machine has the unit and the system lets this process use it. */
void tiles_are_there(int64_t *answer) { *answer = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }

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

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* 16 x 16 numbers. */
INLINE void turn(__m512 numbers[16]) {
    __m512i t[16], *r = (__m512i *)numbers;
    UNROLL for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

static inline int64_t parts_of(int64_t size, int64_t most) { return (size + most - 1) / most; }

static inline int64_t place(const int64_t *token, int64_t n) { return token ? token[n] : n; }

static inline __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : n > 0 ? (1u << n) - 1 : 0; }

/* Numbers rounded to bf16, each in the lower half of a word. */
static inline __m512i rounded(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

/* A tile of each piece: [line][pair of steps], or [pair][line] for the right side; beyond the edges 0. Steps n and
   n + 16 are a pair. Returns whether a number is not finite. */
INLINE int pack_tile(const Lines *x, int64_t line, int64_t lines, int64_t step, int64_t steps, int is_right, int pieces,
                     uint16_t *out) {
    __m512 low[16], high[16];
    int by_line = x->by_step == 1 && !x->step_token;
    if (by_line)
        UNROLL for (int i = 0; i < 16; i++) { /* 32 steps of a line */
            const float *at = x->at + place(x->line_token, line + MIN(i, lines - 1)) * x->by_line + step;
            const float *next = x->at + place(x->line_token, line + MIN(i + SIDE, lines - 1)) * x->by_line + step;
            __builtin_prefetch(next, 0, 2);
            __builtin_prefetch(next + 16, 0, 2);
            low[i] = _mm512_maskz_loadu_ps(i < lines ? first(steps) : 0, at);
            high[i] = _mm512_maskz_loadu_ps(i < lines ? first(steps - 16) : 0, at + 16);
        }
    else
        UNROLL for (int i = 0; i < 16; i++) { /* two steps of 16 lines */
            const float *at = x->at + line;
            int64_t one = place(x->step_token, step + MIN(i, steps - 1));
            int64_t other = place(x->step_token, step + MIN(i + 16, steps - 1));
            __builtin_prefetch(at + place(x->step_token, step + MIN(i + STEPS, steps - 1)) * x->by_step, 0, 2);
            __builtin_prefetch(at + place(x->step_token, step + MIN(i + 16 + STEPS, steps - 1)) * x->by_step, 0, 2);
            low[i] = _mm512_maskz_loadu_ps(i < steps ? first(lines) : 0, at + one * x->by_step);
            high[i] = _mm512_maskz_loadu_ps(i + 16 < steps ? first(lines) : 0, at + other * x->by_step);
        }
    if (by_line == is_right) turn(low), turn(high);
    if (pieces == 1) {
        UNROLL for (int i = 0; i < 16; i++)
            _mm512_store_si512(out + i * 32, _mm512_or_si512(rounded(low[i]), _mm512_slli_epi32(rounded(high[i]), 16)));
        return 0;
    }
    __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    __mmask16 is_odd = 0;
    UNROLL for (int i = 0; i < 16; i++) {
        is_odd |= _mm512_fpclass_ps_mask(low[i], 0x99) | _mm512_fpclass_ps_mask(high[i], 0x99); /* infinite or NaN */
        UNROLL for (int piece = 0; piece < PIECES; piece++) { /* its upper half, and then what is left */
            __m512i a = (__m512i)low[i], b = _mm512_and_si512((__m512i)high[i], upper);
            _mm512_store_si512(out + piece * 2 * TILE + i * 32, _mm512_or_si512(_mm512_srli_epi32(a, 16), b));
            low[i] = _mm512_sub_ps(low[i], (__m512)_mm512_and_si512(a, upper));
            high[i] = _mm512_sub_ps(high[i], (__m512)b);
        }
    }
    return is_odd != 0;
}

/* Panels [step of tiles][piece][half] of lines, in the order in which numbers lie in memory. */
INLINE int pack(const Lines *x, int64_t line, int64_t lines, int64_t step, int64_t steps, int is_right, int pieces,
                uint16_t *out) {
    int64_t depth = parts_of(steps, STEPS), panels = parts_of(lines, SIDE), is_odd = 0;
    int by_step = x->by_line == 1 && !x->line_token;
    for (int64_t n = 0; n < depth * panels; n++) {
        int64_t l = (by_step ? n % panels : n / depth), k = (by_step ? n / panels : n % depth);
        uint16_t *to = out + (l * depth + k) * pieces * 2 * TILE;
        for (int half = 0; half < 2; half++) {
            int64_t from = l * SIDE + half * 16;
            if (from < lines)
                is_odd |= pack_tile(x, line + from, lines - from, step + k * STEPS, steps - k * STEPS, is_right, pieces,
                                    to + half * TILE);
            else /* its products are not looked at */
                for (int piece = 0; piece < pieces; piece++)
                    memset(to + half * TILE + piece * 2 * TILE, 0, TILE * sizeof *to);
        }
    }
    return is_odd != 0;
}

/* The compiler does not know that tiles read memory. */
#define FENCE() __asm__ volatile("" ::: "memory")
#define LOAD_ROWS(piece)                                     \
    do {                                                     \
        _tile_loadd(4, left + (piece) * 2 * TILE, 64);       \
        _tile_loadd(5, left + ((piece) * 2 + 1) * TILE, 64); \
    } while (0)
#define LOAD_COLUMNS(piece)                                   \
    do {                                                      \
        _tile_loadd(6, right + (piece) * 2 * TILE, 64);       \
        _tile_loadd(7, right + ((piece) * 2 + 1) * TILE, 64); \
    } while (0)
#define ADD()                    \
    do {                         \
        _tile_dpbf16ps(0, 4, 6); \
        _tile_dpbf16ps(1, 4, 7); \
        _tile_dpbf16ps(2, 5, 6); \
        _tile_dpbf16ps(3, 5, 7); \
    } while (0)

/* The product of two panels into tiles 0 to 3; meanwhile `rows` lines at `next` come near, where the next block goes. */
INLINE void make_sums(const uint16_t *left, const uint16_t *right, int64_t depth, int pieces, const float *next,
                      int64_t stride, int64_t rows) {
    float unused[TILE / 2] __attribute__((aligned(64)));
    int64_t row = 0;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    FENCE();
    for (int64_t k = 0; k < depth; k++, left += pieces * 2 * TILE, right += pieces * 2 * TILE) {
        if (pieces > 1 && k && k % QUEUE == 0) _tile_stored(0, unused, 64);
        for (int64_t last = rows * (k + 1) / depth; row < last; row++) {
            __builtin_prefetch(next + row * stride, 0, 2);
            __builtin_prefetch(next + row * stride + 16, 0, 2);
        }
        LOAD_COLUMNS(0);
        if (pieces > 1) { /* the small products come first, as far as few loads allow it */
            LOAD_ROWS(2);
            ADD();
            LOAD_ROWS(1);
            ADD();
        }
        LOAD_ROWS(0);
        ADD();
        if (pieces > 1) {
            LOAD_COLUMNS(2);
            ADD();
            LOAD_COLUMNS(1);
            ADD();
            LOAD_ROWS(1);
            ADD();
        }
    }
}

static inline void store_block(float *at, int64_t stride) {
    _tile_stored(0, at, stride * 4);
    _tile_stored(1, at + 16, stride * 4);
    _tile_stored(2, at + 16 * stride, stride * 4);
    _tile_stored(3, at + 16 * stride + 16, stride * 4);
    FENCE();
}

/* Products one side of which is the same: together they are one, whose other side goes on from one to the next. */
typedef struct {
    const Product *products;
    int64_t rows, columns;     /* panels */
    int64_t by_row, by_column; /* parts that it is divided into */
    int has_one_left;          /* the left side is the same, and columns go on; else the right one, and rows do */
} Group;

/* The product that has a panel of the side that goes on, and where the panel is among its own. */
static inline const Product *product_at(const Group *group, int64_t *panel) {
    const Product *p = group->products;
    for (;; p++) {
        int64_t own = parts_of(group->has_one_left ? p->columns : p->rows, SIDE);
        if (*panel < own) return p;
        *panel -= own;
    }
}

/* A block of a result. */
typedef struct {
    float *at;
    int64_t stride, rows, width;
} Block;

static inline Block block_at(const Group *group, int64_t row, int64_t column) {
    const Product *p = product_at(group, group->has_one_left ? &column : &row);
    return (Block){p->out + row * SIDE * p->stride + column * SIDE, p->stride, MIN(p->rows - row * SIDE, SIDE),
                   MIN(p->columns - column * SIDE, SIDE)};
}

/* Write a block, or add it to what is there. */
INLINE void make_block(const uint16_t *left, const uint16_t *right, int64_t depth, int pieces, Block to, Block next,
                       int64_t adds) {
    make_sums(left, right, depth, pieces, next.at, next.stride, next.rows);
    if (!adds && to.rows == SIDE && to.width == SIDE) {
        store_block(to.at, to.stride);
        return;
    }
    float block[SIDE * SIDE] __attribute__((aligned(64)));
    store_block(block, SIDE);
    for (int64_t r = 0; r < to.rows; r++, to.at += to.stride)
        for (int64_t c = 0; c < SIDE; c += 16) {
            __m512 sum = _mm512_load_ps(block + r * SIDE + c);
            if (adds) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(first(to.width - c), to.at + c));
            _mm512_mask_storeu_ps(to.at + c, first(to.width - c), sum);
        }
}

static __thread uint16_t *room; /* panels, kept by a thread from one product to the next */

/* Panels [begin, end) of one side of a group. sides: the product whose sides count where the group is one product. */
INLINE int pack_side(const Group *group, const Product *sides, int64_t begin, int64_t end, int64_t step, int64_t steps,
                     int is_right, int pieces, uint16_t *out) {
    int is_odd = 0;
    for (int64_t n = begin, many; n < end; n += many) {
        int64_t panel = n;
        const Product *p = is_right == group->has_one_left ? product_at(group, &panel) : group->products;
        p = p->more || sides != group->products ? sides : p;
        int64_t lines = MIN((is_right ? p->columns : p->rows) - panel * SIDE, (end - n) * SIDE);
        is_odd |= pack(is_right ? &p->right : &p->left, panel * SIDE, lines, step, steps, is_right, pieces, out);
        many = parts_of(lines, SIDE), out += many * parts_of(steps, STEPS) * pieces * 2 * TILE;
    }
    return is_odd;
}

/* Some steps of a part of a group by the vector unit. */
static void make_plainly(const Group *group, const Product *sides, int64_t step, int64_t steps, const int64_t rows[2],
                         const int64_t columns[2], int64_t adds) {
    for (int64_t row = rows[0]; row < rows[1]; row++)
        for (int64_t column = columns[0]; column < columns[1]; column++) {
            int64_t r = row, c = column;
            const Product *p = product_at(group, group->has_one_left ? &c : &r);
            Product part = *p;
            if (sides != group->products) part.left = sides->left, part.right = sides->right;
            part.more = NULL, part.steps = steps, part.adds = adds;
            Lines *both[] = {&part.left, &part.right};
            for (int n = 0; n < 2; n++)
                if (both[n]->step_token)
                    both[n]->step_token += step;
                else
                    both[n]->at += step * both[n]->by_step;
            multiply_part(&part, r * SIDE, MIN((r + 1) * SIDE, p->rows), c * SIDE, MIN((c + 1) * SIDE, p->columns));
        }
}

/* Panels of rows and columns, from and to, of a group. */
INLINE void make_tiles(const Group *group, const int64_t rows[2], const int64_t columns[2], int pieces) {
    if (!room && !(room = aligned_alloc(64, (LEFT + RIGHT) * PANEL * sizeof *room))) abort();
    uint16_t *left = room, *right = room + LEFT * PANEL;
    int64_t adds = group->products->adds;
    for (const Product *p = group->products; p; p = p->more) {
        int64_t all = parts_of(p->steps, STEPS), depths = parts_of(p->steps, DEEP);
        for (int64_t d = 0; d < depths; d++, adds = 1) {
            int64_t step = all * d / depths * STEPS, steps = MIN(p->steps, all * (d + 1) / depths * STEPS) - step;
            int64_t depth = parts_of(steps, STEPS), panel = depth * pieces * 2 * TILE;
            int is_odd = pack_side(group, p, columns[0], columns[1], step, steps, 1, pieces, right);
            for (int64_t from = rows[0]; from < rows[1]; from += LEFT) {
                int64_t some[2] = {from, MIN(rows[1], from + LEFT)};
                if (pack_side(group, p, some[0], some[1], step, steps, 0, pieces, left) || is_odd) {
                    make_plainly(group, p, step, steps, some, columns, adds);
                    continue;
                }
                for (int64_t r = some[0]; r < some[1]; r++)
                    for (int64_t c = columns[0]; c < columns[1]; c++)
                        make_block(left + (r - from) * panel, right + (c - columns[0]) * panel, depth, pieces,
                                   block_at(group, r, c), block_at(group, MIN(r + 1, rows[1] - 1), c), adds);
            }
        }
    }
    for (int64_t r = rows[0]; r < rows[1] && !adds; r++)
        for (int64_t c = columns[0]; c < columns[1]; c++) {
            Block block = block_at(group, r, c);
            for (int64_t n = 0; n < block.rows; n++)
                memset(block.at + n * block.stride, 0, block.width * sizeof *block.at);
        }
}

/* Divide a group into `wanted` parts at least, where it has so many panels. Both sides of a part are packed: it should
   be square. */
static void divide(Group *group, int64_t wanted) {
    int64_t rows = MAX(group->rows, 1), columns = MAX(group->columns, 1);
    int64_t by_row = 1, by_column = parts_of(columns, RIGHT);
    while (by_row * by_column < wanted && (by_row < rows || by_column < columns))
        if (by_column == columns || (by_row < rows && rows * by_column >= columns * by_row))
            by_row++;
        else
            by_column++;
    group->by_row = by_row, group->by_column = by_column;
}

static int64_t work_of(const Product *p) {
    int64_t work = 0;
    for (const Product *each = p; each; each = each->more) work += p->rows * p->columns * each->steps;
    return work;
}

static int are_same(const Lines *one, const Lines *other) { return !memcmp(one, other, sizeof *one); }

/* The products from the first on that have a side in common; returns how many these are. */
static int64_t group_of(const Product *first, int64_t count, Group *group) {
    int64_t n = 1, *goes_on;
    *group = (Group){first, parts_of(first->rows, SIDE), parts_of(first->columns, SIDE), .has_one_left = 1};
    for (; n < count; n++) {
        const Product *next = first + n;
        if (next->more || first->more || next->steps != first->steps || next->adds != first->adds) break;
        int has_left = next->rows == first->rows && are_same(&next->left, &first->left);
        int has_right = next->columns == first->columns && are_same(&next->right, &first->right);
        if (n == 1) group->has_one_left = !has_right;
        if (group->has_one_left ? !has_left : !has_right) break;
        goes_on = group->has_one_left ? &group->columns : &group->rows;
        *goes_on += parts_of(group->has_one_left ? next->columns : next->rows, SIDE);
    }
    return n;
}

void multiply_in_tiles(const Product *products, int64_t count, int64_t pieces) {
    int64_t tasks = 0, work = 0, threads = omp_get_max_threads(), groups = 0;
    Group *all = malloc(MAX(count, 1) * sizeof *all);
    if (!all) abort();
    for (int64_t n = 0; n < count; groups++) n += group_of(products + n, count - n, all + groups);
    for (int64_t n = 0; n < count; n++) work += work_of(products + n);
    for (int64_t n = 0; n < groups; n++) { /* several are divided so that no thread waits long for another */
        int64_t share = threads, own = 0, after = n + 1 < groups ? all[n + 1].products - products : count;
        for (const Product *p = all[n].products; p < products + after; p++) own += work_of(p);
        if (groups > 1) share = parts_of(2 * threads * own, MAX(work, 1));
        divide(all + n, work > MUCH * 16 ? share : 1);
        tasks += all[n].by_row * all[n].by_column;
    }
#pragma omp parallel for schedule(dynamic) if (work > MUCH * 16)
    for (int64_t task = 0; task < tasks; task++) {
        const Group *group = all;
        int64_t left = task;
        for (; left >= group->by_row * group->by_column; group++) left -= group->by_row * group->by_column;
        int64_t row = left / group->by_column, column = left % group->by_column;
        int64_t rows[2] = {group->rows * row / group->by_row, group->rows * (row + 1) / group->by_row};
        int64_t columns[2] = {group->columns * column / group->by_column,
                              group->columns * (column + 1) / group->by_column};
        TileConfig before = configured();
        if (pieces == 1)
            make_tiles(group, rows, columns, 1);
        else
            make_tiles(group, rows, columns, PIECES);
        give_back(before);
    }
    free(all);
}

#else

void tiles_are_there(int64_t *answer) { *answer = 0; }

void multiply_in_tiles(const Product *products, int64_t count, int64_t pieces) {
    (void)pieces;
    multiply(products, count);
}

#endif
