/* The tiles of the fused losses on one CPU core: scores, weights, products of the gradients.
 *
 * Scores are kept with one row per class and one column per token, [W, P] with P tokens padded to
 * whole vectors: prototypes are then read as they lie in memory, and what is summed, divided or
 * compared per token runs down the columns, a vector of tokens at a time. `native.py` compiles
 * this file for the machine at hand and is its only caller; arrays are float32 and contiguous.
 */

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
enum { PANEL = 3 * LANES, DEPTH = 1024, SUMMED = 32, KEPT = 1 << 17 }; /* KEPT floats: of a cache */

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

/* c[i, j] (+)= sum over k of a[offset[i] + k * step] * b[k, j], for `vectors` vectors of columns,
 * of which `columns` floats are stored, and the first `rows` of ROWS rows. With `narrow` a and b
 * are pairs, and so are the terms. */
static inline __attribute__((always_inline)) void
multiply(int vectors, int narrow, long depth, const float *a, const long *offset, long step,
         const float *b, float *c, long stride, int rows, long columns, int add)
{
    vec sums[ROWS][3];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++) {
            sums[i][j] = (vec){0};
            if (i < rows) __builtin_prefetch(c + i * stride + j * LANES, 1);
        }
    for (long k = 0; k < depth; k++, a += step, b += vectors * LANES) {
        vec right[3];
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++) right[j] = load(b + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            const float *left = a + offset[i];
#pragma GCC unroll 3
            for (int j = 0; j < vectors; j++)
                sums[i][j] = narrow ? add_pairs(sums[i][j], left, right[j])
                                    : sums[i][j] + *left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        if (i >= rows) continue;
        float *row = c + i * stride;
        if (columns == vectors * LANES) {
#pragma GCC unroll 3
            for (int j = 0; j < vectors; j++) {
                float *to = row + j * LANES;
                store(to, add ? load(to) + sums[i][j] : sums[i][j]);
            }
        } else {
            float found[PANEL];
#pragma GCC unroll 3
            for (int j = 0; j < vectors; j++) store(found + j * LANES, sums[i][j]);
            for (long j = 0; j < columns; j++) row[j] = add ? row[j] + found[j] : found[j];
        }
    }
}

static void multiply_panel(int narrow, long depth, const float *a, const long *offset, long step,
                           const float *b, float *c, long stride, int rows, long columns, int add)
{
#define CASE(VECTORS, NARROW) \
    multiply(VECTORS, NARROW, depth, a, offset, step, b, c, stride, rows, columns, add)
    const int vectors = columns > 2 * LANES ? 3 : columns > LANES ? 2 : 1;
    if (narrow)
        vectors == 3 ? CASE(3, 1) : vectors == 2 ? CASE(2, 1) : CASE(1, 1);
    else
        vectors == 3 ? CASE(3, 0) : vectors == 2 ? CASE(2, 0) : CASE(1, 0);
#undef CASE
}

static inline long padded(long count, long multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

static inline vec load_first(const float *from, long count)
{
    if (count >= LANES) return load(from);
    float found[LANES] = {0};
    memcpy(found, from, count * sizeof(float));
    return load(found);
}

/* Columns `from` on of x [rows, width] as one panel [rows, vectors], zeros at the end; with
 * `narrow` pairs of rows [rows / 2, vectors]. */
static void pack_panel(const float *x, long rows, long width, long from, int narrow, float *panel)
{
    const long there = least(width - from, PANEL), wide = padded(there, LANES);
    for (long r = 0; r < rows; r += 1 + narrow, panel += wide)
        for (long j = 0; j < wide; j += LANES) {
            const float *row = x + r * width + from + j;
            vec found = load_first(row, there - j);
            if (narrow)
                found = pair(found, r + 1 < rows ? load_first(row + width, there - j) : (vec){0});
            store(panel + j, found);
        }
}

/* What tokens must be padded to. */
long token_multiple(void) { return LANES > ROWS ? LANES : ROWS; }
long panel_width(void) { return PANEL; }

/* Put tokens x [T, D] where the products want them: `across`, panels of tokens [D, tokens] times
 * `scale`, padded to P tokens of zeros, and `along`, panels of dimensions [T, dimensions], or of
 * pairs of tokens [T / 2, dimensions] if `narrow`. */
void pack_tokens(const float *x, long T, long P, long D, float scale, int narrow, float *across,
                 float *along)
{
    for (long from = 0; from < P; from += PANEL) {
        const long wide = least(P - from, PANEL);
        float *panel = across + from * D;
        for (long j = 0; j < wide; j++)
            for (long d = 0; d < D; d++)
                panel[d * wide + j] = from + j < T ? scale * x[(from + j) * D + d] : 0;
    }
    const long depth = narrow ? (T + 1) / 2 : T;
    for (long from = 0; from < D; from += PANEL)
        pack_panel(x, T, D, from, narrow, along + from * depth);
}

/* scores [W, P] = prototypes [W, D] times the tokens, times gain [W], plus column [W] and row [P]
 * (each may be null); excluded pairs (class, token) in order of classes, counted from `first`,
 * become `fill`. best [P] gets the largest of each token if `linear`, else the least. */
static void score_tile(const float *prototypes, long W, long D, const float *across, long P,
                       const float *gain, const float *column, const float *row,
                       const int64_t *excluded, long num_excluded, long first, int linear,
                       float *scores, float *best)
{
    const float fill = linear ? -__builtin_inff() : __builtin_inff();
    for (long t = 0; t < P; t++) best[t] = fill;
    for (long k = 0; k < D; k += DEPTH)
        for (long from = 0; from < P; from += PANEL) { /* a panel at a time stays in the cache */
            const long wide = least(P - from, PANEL);
            for (long c = 0; c < W; c += ROWS) {
                const int rows = (int)least(W - c, ROWS);
                long offset[ROWS];
                for (int i = 0; i < ROWS; i++) offset[i] = least(i, rows - 1) * D;
                multiply_panel(0, least(D - k, DEPTH), prototypes + c * D + k, offset, 1,
                               across + from * D + k * wide, scores + c * P + from, P, rows, wide,
                               k > 0);
            }
        }
    for (long c = 0; c < W; c++) {
        float *score = scores + c * P;
        if (!linear)
            for (long t = 0; t < P; t += LANES) {
                vec found = load(score + t) * all(gain ? gain[c] : 1) + all(column[c]);
                if (row) found += load(row + t);
                store(score + t, found);
            }
        for (; num_excluded && excluded[0] == first + c; num_excluded--, excluded += 2)
            score[excluded[1]] = fill;
        for (long t = 0; t < P; t += LANES) {
            const vec found = load(score + t), old = load(best + t);
            const ivec better = linear ? found > old : found < old;
            store(best + t, choose(better | (found != found), found, old)); /* NaN stays */
        }
    }
}

/* 2^whole * e^x for |x| <= 0.35, whole <= 0; 0 below 2^-126. `bits` ends in the bits of whole. */
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

/* From scores [W, P] and what is best of each token [P]: sums [P] of exp(score - best) if
 * `linear`, else of (best / score) ^ exponent (`whole` is the exponent if it is a whole number,
 * else 0). With `keep` the scores are replaced by these weights, for distances times best / score.
 */
void weigh_tile(float *scores, long W, long P, const float *best, float exponent, int whole,
                int linear, int keep, float *sums)
{
    for (long t = 0; t < P; t += LANES) {
        const vec worst = all(linear ? -__builtin_inff() : __builtin_inff());
        const vec peak = choose(load(best + t) == worst, (vec){0}, load(best + t));
        vec total = {0};
        for (long from = 0; from < W; from += SUMMED) { /* sums of sums, for their last digits */
            const long stop = least(from + SUMMED, W);
            vec part = {0};
            for (long c = from; c < stop; c++) {
                float *score = scores + c * P + t;
                const vec ratio = linear ? load(score) - peak : peak / load(score);
                const vec weight = linear ? exp_nats(ratio) : power(ratio, exponent, whole);
                part += weight;
                if (keep) store(score, linear ? weight : weight * ratio);
            }
            total += part;
        }
        store(sums + t, total);
    }
}

/* Of V classes the tiles of `width`, each taken from *next by whichever thread is free: scores,
 * best and, if none is below its token's of `limits` [T] (or null), weights and sums. Such a tile
 * is returned before it is weighed, for somebody to look at; -1 when all are taken. `excluded` is
 * parted among the tiles by `bounds` [tiles + 1]; gain and column are [V], best and sums
 * [tiles, P], scores [V, P], or [width, P] unless they are to be kept. */
long weigh_tiles(int64_t *next, const float *prototypes, long V, long width, long D,
                 const float *across, long T, long P, const float *gain, const float *column,
                 const float *row, const float *limits, const int64_t *excluded,
                 const int64_t *bounds, long first, float exponent, int whole, int linear,
                 int keep, float *scores, float *best, float *sums)
{
    for (;;) {
        const long k = (long)__atomic_fetch_add(next, 1, __ATOMIC_RELAXED), from = k * width;
        if (from >= V) return -1;
        const long W = least(width, V - from);
        float *tile = scores + (keep ? from * P : 0), *found = best + k * P;
        score_tile(prototypes + from * D, W, D, across, P, gain ? gain + from : 0,
                   column ? column + from : 0, row, excluded + 2 * bounds[k],
                   bounds[k + 1] - bounds[k], first + from, linear, tile, found);
        for (long t = 0; limits && t < T; t++)
            if (found[t] < limits[t]) return k;
        weigh_tile(tile, W, P, found, exponent, whole, linear, keep, sums + k * P);
    }
}

/* Pairs of tokens [W, P / 2] of weights [W, P]. */
static const float *pack_pairs(const float *weights, long W, long P, float *pairs)
{
    const word *bits = (const word *)weights;
    word *to = (word *)pairs;
    for (long k = 0; k < W * P / 2; k++)
        to[k] = bits[2 * k] >> 16 | (bits[2 * k + 1] & 0xffff0000u);
    return pairs;
}

/* Blocks of tokens [P / ROWS, W, ROWS] of weights [W, P], or [P / ROWS, W / 2, ROWS] of pairs of
 * classes if `narrow`. */
static void pack_blocks(const float *weights, long W, long P, int narrow, float *blocks)
{
    for (long t = 0; t < P; t += ROWS)
        for (long c = 0; c < W; c += 1 + narrow, blocks += ROWS) {
            const float *weight = weights + c * P + t;
            if (!narrow) {
                memcpy(blocks, weight, ROWS * sizeof(float));
                continue;
            }
            const word *bits = (const word *)weight;
            for (int i = 0; i < ROWS; i++)
                ((word *)blocks)[i] = bits[i] >> 16 | (c + 1 < W ? bits[P + i] & 0xffff0000u : 0);
        }
}

/* Scale weights [W, P] by factor [P] and gain [W] (or null), in place, and add up their columns
 * [W] and rows [P] (each may be null). Add their products to those of the prototypes [W, D]
 * (stored, unless `add`) and of the tokens [P, D]; either may be null. With `narrow` weights are
 * rounded to bfloat16 before they are added up, and the products are of bfloat16. `scratch` holds
 * W * (P + PANEL). */
static void accumulate_tile(float *weights, long W, long T, long P, long D, const float *factor,
                            const float *gain, const float *prototypes, const float *along,
                            int narrow, float *to_prototypes, int add, float *to_tokens,
                            float *columns, float *rows, float *scratch)
{
    float *part = scratch; /* of the rows: the sums of a tile have more digits than those of all */
    if (rows) memset(part, 0, P * sizeof(float));
    for (long c = 0; c < W; c++) {
        const vec scale = all(gain ? gain[c] : 1);
        float column = 0, *weight = weights + c * P;
        for (long t = 0; t < P; t += LANES) {
            vec found = load(weight + t) * load(factor + t) * scale;
            if (narrow) found = (vec)((uvec)pair((vec){0}, found) & 0xffff0000u);
            store(weight + t, found);
            if (rows) store(part + t, load(part + t) + found);
        }
        if (narrow && T < P) weight[T] = 0; /* the other half of the last pair */
        if (columns) {
            for (long t = 0; t < T; t++) column += weight[t];
            columns[c] += column;
        }
    }
    if (rows)
        for (long t = 0; t < P; t += LANES) store(rows + t, load(rows + t) + load(part + t));
    if (to_prototypes) {
        const long depth = narrow ? (T + 1) / 2 : T, stride = narrow ? P / 2 : P;
        const float *left = weights;
        if (narrow) left = pack_pairs(weights, W, P, scratch);
        const long group = (KEPT / (depth * PANEL) > 0 ? KEPT / (depth * PANEL) : 1) * PANEL;
        for (long first = 0; first < D; first += group)
            for (long c = 0; c < W; c += ROWS) {
                const int height = (int)least(W - c, ROWS);
                long offset[ROWS];
                for (int i = 0; i < ROWS; i++) offset[i] = least(i, height - 1) * stride;
                for (long from = first; from < least(first + group, D); from += PANEL)
                    multiply_panel(narrow, depth, left + c * stride, offset, 1,
                                   along + from * depth, to_prototypes + c * D + from, D, height,
                                   least(D - from, PANEL), add);
            }
    }
    if (to_tokens) {
        static const long offset[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        const long depth = narrow ? (W + 1) / 2 : W;
        float *packed = scratch, *panel = scratch + W * P;
        pack_blocks(weights, W, P, narrow, packed);
        for (long from = 0; from < D; from += PANEL) {
            pack_panel(prototypes, W, D, from, narrow, panel);
            const long next = least(D - from - PANEL, PANEL);
            for (long t = 0, c = 0; t < P; t += ROWS) {
                for (; c < W * (t + ROWS) / P; c++) /* meanwhile the next panel comes */
                    for (long d = 0; d < next; d += 16)
                        __builtin_prefetch(prototypes + c * D + from + PANEL + d, 0, 2);
                multiply_panel(narrow, depth, packed + t * depth, offset, ROWS, panel,
                               to_tokens + t * D + from, D, ROWS, least(D - from, PANEL), 1);
            }
        }
    }
}

/* Every `step`-th tile of `width` of V classes from tile `first` on; factors [tiles, P]. */
void accumulate_tiles(long first, long step, float *weights, long V, long width, long T, long P,
                      long D, const float *factors, const float *gain, const float *prototypes,
                      const float *along, int narrow, float *to_prototypes, int add,
                      float *to_tokens, float *columns, float *rows, float *scratch)
{
    for (long k = first; k * width < V; k += step) {
        const long from = k * width;
        accumulate_tile(weights + from * P, least(width, V - from), T, P, D, factors + k * P,
                        gain ? gain + from : 0, prototypes + from * D, along, narrow,
                        to_prototypes ? to_prototypes + from * D : 0, add, to_tokens,
                        columns ? columns + from : 0, rows, scratch);
    }
}
