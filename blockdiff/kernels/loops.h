/* Shared by the C functions of all ops: rows of tensors, a vectorisable exponential, and the split of loops.

   All numbers are fp32 and all sizes int64. The gradient of a weight is summed over tokens in BLOCKS partial sums,
   whatever the number of threads, so that one thread and many give the same bits. */

#ifndef _OPENMP
#error "compiled without OpenMP: everything would run on one thread"
#endif

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCKS 16
#define MUCH (1 << 14) /* least elements of a loop for which a second thread pays */
#define ROUNDS 12582912.0f /* 1.5 * 2^23: adding it rounds a number to an integer in the last bits of the sum */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* The first row of a block; that of block BLOCKS is the number of rows. */
static inline int64_t first_row(int64_t block, int64_t rows) { return rows * block / BLOCKS; }

/* e^x to about one unit in the last place (Cephes' expf): 0 below the normal numbers, and never infinite. */
static inline float exp_of(float x) {
    int is_nothing = x < -87.3f;
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.3f ? 88.3f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    float rounded = n + ROUNDS, power;
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    bits = (bits + 127u) << 23;
    memcpy(&power, &bits, sizeof power);
    return is_nothing ? 0.0f : p * power;
}

/* Sum the partial sums [BLOCKS, width] into `out`, in their order. */
static inline void add_up(const float *partial, int64_t width, float *out) {
    memset(out, 0, width * sizeof *out);
    for (int64_t b = 0; b < BLOCKS; b++)
        for (int64_t i = 0; i < width; i++) out[i] += partial[b * width + i];
}
