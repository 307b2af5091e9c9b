/* Vectors of floats as the processor has them, pairs of bfloat16, powers and logarithms. */

#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 8 }; /* 24 of 32 registers hold sums */
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 4 }; /* 12 of 16 */
#else
enum { LANES = 4, ROWS = 8 }; /* 24 of 32, as ARM has them */
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef float anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t word __attribute__((may_alias));

static inline long least(long a, long b) { return a < b ? a : b; }
static inline vec load(const float *from) { return *(const anywhere *)from; }
static inline void store(float *to, vec value) { *(anywhere *)to = value; }
static inline vec all(float value) { return value - (vec){0}; }
static inline vec choose(ivec mask, vec yes, vec no)
{
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* A pair is two bfloat16 in the place of a float, the first in its lower half. */
#if defined(__AVX512BF16__)
static inline vec pair(vec first, vec second)
{
    const ivec both = (ivec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    const ivec turns = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006,
                        0x170007, 0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d,
                        0x1e000e, 0x1f000f};
    return (vec)_mm512_permutexvar_epi16((__m512i)turns, (__m512i)both);
}

static inline vec add_pairs(vec sum, const float *left, vec right)
{
    const __m512i pairs = _mm512_set1_epi32((int)*(const word *)left);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)right);
}
#else /* as much work as float32 */
static inline uvec upper(vec x)
{
    const uvec bits = (uvec)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (uvec)choose(x != x, x, (vec)rounded) & 0xffff0000u; /* a quiet NaN stays one */
}

static inline vec pair(vec first, vec second) { return (vec)(upper(first) >> 16 | upper(second)); }

static inline vec add_pairs(vec sum, const float *left, vec right)
{
    const uvec pairs = *(const word *)left - (uvec){0}, others = (uvec)right;
    sum += (vec)(pairs << 16) * (vec)(others << 16);
    return sum + (vec)(pairs & 0xffff0000u) * (vec)(others & 0xffff0000u);
}
#endif

/* 2^whole * e^x for |x| <= 0.35, whole <= 127; 0 below 2^-126. `bits` ends in the bits of whole. */
static inline vec exponential(vec x, vec whole, ivec bits)
{
    vec sum = all(1.0f / 5040);
    sum = sum * x + 1.0f / 720;
    sum = sum * x + 1.0f / 120;
    sum = sum * x + 1.0f / 24;
    sum = sum * x + 1.0f / 6;
    sum = sum * x + 0.5f;
    sum = sum * x * x + x + 1.0f;
    const vec scaled = (vec)((ivec)sum + (bits << 23));
    return choose(whole < -126.0f, (vec){0}, scaled);
}

#define ROUNDING 12582912.0f /* adding 1.5 * 2^23 leaves a whole number in the last bits */

static inline vec exp_nats(vec x)
{
    x = choose(x < -100.0f, all(-100.0f), x);
    const vec shifted = x * 1.44269504f + ROUNDING, whole = shifted - ROUNDING;
    const vec rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    return exponential(rest, whole, (ivec)shifted);
}

static inline vec exp_bits(vec x)
{
    x = choose(x < -140.0f, all(-140.0f), x);
    const vec shifted = x + ROUNDING, whole = shifted - ROUNDING;
    return exponential((x - whole) * 0.693147181f, whole, (ivec)shifted);
}

/* log2 of a normal number. */
static inline vec log_bits(vec x)
{
    const ivec exponent = ((ivec)x - 0x3f3504f3) >> 23; /* of x over the root of a half */
    const vec mantissa = (vec)((ivec)x - (exponent << 23));
    const vec s = (mantissa - 1.0f) / (mantissa + 1.0f), s2 = s * s;
    vec sum = all(2.88539008f / 11);
    sum = sum * s2 + 2.88539008f / 9;
    sum = sum * s2 + 2.88539008f / 7;
    sum = sum * s2 + 2.88539008f / 5;
    sum = sum * s2 + 2.88539008f / 3;
    sum = sum * s2 + 2.88539008f;
    return __builtin_convertvector(exponent, vec) + s * sum;
}

static inline vec power(vec ratio, float exponent, int whole)
{
    if (!whole) {
        const vec found = exp_bits(exponent * log_bits(ratio));
        return choose(ratio < 1.17549435e-38f, (vec){0}, found);
    }
    vec result = ratio;
    for (int bit = 30 - __builtin_clz(whole); bit >= 0; bit--) {
        result *= result;
        if (whole >> bit & 1) result *= ratio;
    }
    return result;
}
