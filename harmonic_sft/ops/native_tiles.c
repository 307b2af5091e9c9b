/* The tiles of the fused losses on one CPU core: scores, weights, products of the gradients.
 *
 * Scores are kept with one row per class and one column per token, [W, P] with P tokens padded to
 * whole vectors: prototypes are then read as they lie in memory, and what is summed, divided or
 * compared per token runs down the columns, a vector of tokens at a time. `native.py` compiles
 * this file for the machine at hand and is its only caller; arrays are float32 and contiguous.
 */

#include "native_vectors.h"

enum { PANEL = 3 * LANES, DEPTH = 1024, SUMMED = 32, KEPT = 1 << 17 }; /* KEPT floats: of a cache */

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

/* scores [W, P] = prototypes [W, D] times the tokens, times gain [W], plus column [W] and row [P],
 * which may be null; without a column neither gain nor row is used. Excluded pairs (class, token)
 * in order of classes, counted from `first`, become `fill`. best [P] gets the largest of each
 * token if `linear`, else the least. */
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
        if (column)
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

/* From scores [W, P] and what is best of each token [P]: sums [P] of exp(score - best) if
 * `linear`, else of (best / score) ^ exponent (`whole` is the exponent if it is a whole number,
 * else 0). With `keep` the scores are replaced by these weights, for distances times best / score.
 */
static void weigh(float *scores, long W, long P, const float *best, float exponent, int whole,
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

/* How a score becomes a logit: h_exp * log(score / unit[t]) + bias[c], or, without a unit, itself.
 * Infinite scores are excluded, and then the logit is -inf. */
struct logits {
    const float *unit, *bias; /* [P] or null, [V] or null */
    float h_exp;              /* 1 without a unit */
};

/* log(score / unit), or the score itself. */
static inline vec log_of(vec score, const float *unit, long t)
{
    if (!unit) return score;
    const vec least_normal = all(1.17549435e-38f), ratio = score / load(unit + t);
    const vec found = log_bits(choose(ratio < least_normal, least_normal, ratio)) * 0.693147181f;
    return choose((ratio == __builtin_inff()) | (ratio != ratio), ratio, found);
}

/* What is known of the tokens over a tile of scores [W, P], excluded ones left out: the column of
 * the largest logit [P] and that logit `peak` [P]; with p = exp(logit - peak) the sums [P] of p,
 * and moments [4, P], sums of p * log p, p * log_of, logit and log_of. */
static void describe(const float *scores, long W, long P, const struct logits *logits, float *peak,
                     float *sums, float *moments, int32_t *column)
{
    vec logs[W]; /* of the tokens t to t + LANES */
    for (long t = 0; t < P; t += LANES) {
        vec top = all(-__builtin_inff()), totals[5] = {{0}};
        ivec at = {0};
        for (long from = 0; from < W; from += SUMMED) {
            const long stop = least(from + SUMMED, W);
            vec of_logits = {0}, of_logs = {0};
            for (long c = from; c < stop; c++) {
                logs[c] = log_of(load(scores + c * P + t), logits->unit, t);
                const vec logit = logs[c] * logits->h_exp + (logits->bias ? logits->bias[c] : 0);
                const ivec better = (logit > top) | (logit != logit);
                const ivec there = logit != -__builtin_inff();
                top = choose(better, logit, top);
                at = (better & ((int32_t)c - (ivec){0})) | (~better & at);
                of_logits += choose(there, logit, (vec){0});
                of_logs += choose(there, logs[c], (vec){0});
            }
            totals[3] += of_logits;
            totals[4] += of_logs;
        }
        const vec base = choose(top == -__builtin_inff(), (vec){0}, top);
        for (long from = 0; from < W; from += SUMMED) {
            const long stop = least(from + SUMMED, W);
            vec parts[3] = {{0}};
            for (long c = from; c < stop; c++) {
                const vec logit = logs[c] * logits->h_exp + (logits->bias ? logits->bias[c] : 0);
                const vec p = exp_nats(logit - base);
                parts[0] += p;
                parts[1] += choose(p == 0.0f, (vec){0}, p * (logit - base));
                parts[2] += choose(p == 0.0f, (vec){0}, p * logs[c]);
            }
            for (int k = 0; k < 3; k++) totals[k] += parts[k];
        }
        store(peak + t, top);
        store(sums + t, totals[0]);
        for (int k = 0; k < 4; k++) store(moments + k * P + t, totals[k + 1]);
        memcpy(column + t, &at, sizeof at);
    }
}

/* -2 dL/d(score), or dL/dlogit without a unit, from `rows` [3, P]: log-normalizer, mass and
 * smoothing, dL/dlogit = mass * p - smoothing; 0 for excluded ones. *slope gets dL/dlogit. What
 * stands there for tokens that are only padding may be anything. */
static inline vec differentiate(vec score, const struct logits *logits, float bias,
                                const float *rows, long P, long t, vec *slope)
{
    const vec logit = log_of(score, logits->unit, t) * logits->h_exp + bias;
    const vec p = exp_nats(logit - load(rows + t));
    const vec found = p * load(rows + P + t) - load(rows + 2 * P + t);
    *slope = choose(logit == -__builtin_inff(), (vec){0}, found);
    return logits->unit ? *slope * (-2 * logits->h_exp) / score : *slope;
}

/* What a tile of scores is turned into: the weights of `weigh` if `logits` is null, else, if
 * there are moments, what `describe` finds. */
void weigh_tile(float *scores, long W, long P, float *best, float exponent, int whole, int linear,
                int keep, float *sums, const struct logits *logits, float *moments,
                int32_t *column)
{
    if (!logits)
        weigh(scores, W, P, best, exponent, whole, linear, keep, sums);
    else if (moments)
        describe(scores, W, P, logits, best, sums, moments, column);
}

/* Of V classes the tiles of `width`, each taken from *next by whichever thread is free: scores,
 * best and, if none is below its token's of `limits` [T] (or null), `weigh_tile`. Such a tile is
 * returned before it is weighed, for somebody to look at; -1 when all are taken. `excluded` is
 * parted among the tiles by `bounds` [tiles + 1]; gain and column are [V], best, sums and columns
 * [tiles, P], moments [tiles, 4, P], scores [V, P], or [width, P] unless they are to be kept. */
long weigh_tiles(int64_t *next, const float *prototypes, long V, long width, long D,
                 const float *across, long T, long P, const float *gain, const float *column,
                 const float *row, const float *limits, const int64_t *excluded,
                 const int64_t *bounds, long first, float exponent, int whole, int linear,
                 int keep, float *scores, float *best, float *sums, const struct logits *logits,
                 float *moments, int32_t *columns)
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
        struct logits own = {0};
        if (logits) own = *logits;
        if (own.bias) own.bias += from;
        weigh_tile(tile, W, P, found, exponent, whole, linear, keep, sums + k * P,
                   logits ? &own : 0, moments ? moments + 4 * k * P : 0,
                   columns ? columns + k * P : 0);
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

/* Of a vector the lanes before `count`. */
static inline ivec lanes_before(long count)
{
    ivec lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i < count ? -1 : 0;
    return lanes;
}

/* Scale weights [W, P] by factor [P] and gain [W] (or null), in place, and add up their columns
 * [W] and rows [P] (each may be null). With `logits` they are scores still, and `factor` is what
 * `differentiate` wants. Add their products to those of the prototypes [W, D] (stored, unless
 * `add`) and of the tokens [P, D]; either may be null. With `narrow` weights are rounded to
 * bfloat16 before they are added up, and the products are of bfloat16. Before gain and rounding
 * they, or the dL/dlogit of scores, are added up in `biases` [W] (or null). `scratch` holds
 * W * (P + PANEL). */
static void accumulate_tile(float *weights, long W, long T, long P, long D, const float *factor,
                            const float *gain, const float *prototypes, const float *along,
                            int narrow, float *to_prototypes, int add, float *to_tokens,
                            float *columns, float *rows, float *scratch,
                            const struct logits *logits, float *biases)
{
    float *part = scratch; /* of the rows: the sums of a tile have more digits than those of all */
    if (rows) memset(part, 0, P * sizeof(float));
    for (long c = 0; c < W; c++) {
        const vec scale = all(gain ? gain[c] : 1);
        const float bias = logits && logits->bias ? logits->bias[c] : 0;
        float column = 0, *weight = weights + c * P;
        vec slope, slopes = {0};
        for (long t = 0; t < P; t += LANES) {
            vec found = load(weight + t);
            if (logits)
                found = differentiate(found, logits, bias, factor, P, t, &slope);
            else
                slope = found *= load(factor + t);
            if (biases)
                slopes += T - t < LANES ? choose(lanes_before(T - t), slope, (vec){0}) : slope;
            found *= scale;
            if (narrow) found = (vec)((uvec)pair((vec){0}, found) & 0xffff0000u);
            store(weight + t, found);
            if (rows) store(part + t, load(part + t) + found);
        }
        if (narrow && T < P) weight[T] = 0; /* the other half of the last pair */
        if (columns) {
            for (long t = 0; t < T; t++) column += weight[t];
            columns[c] += column;
        }
        for (int i = 0; biases && i < LANES; i++) biases[c] += slopes[i];
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

/* Every `step`-th tile of `width` of V classes from tile `first` on; factors [tiles, P], or with
 * `logits` the same [3, P] for all tiles. */
void accumulate_tiles(long first, long step, float *weights, long V, long width, long T, long P,
                      long D, const float *factors, const float *gain, const float *prototypes,
                      const float *along, int narrow, float *to_prototypes, int add,
                      float *to_tokens, float *columns, float *rows, float *scratch,
                      const struct logits *logits, float *biases)
{
    for (long k = first; k * width < V; k += step) {
        const long from = k * width;
        struct logits own = {0};
        if (logits) own = *logits;
        if (own.bias) own.bias += from;
        accumulate_tile(weights + from * P, least(width, V - from), T, P, D,
                        logits ? factors : factors + k * P, gain ? gain + from : 0,
                        prototypes + from * D, along, narrow,
                        to_prototypes ? to_prototypes + from * D : 0, add, to_tokens,
                        columns ? columns + from : 0, rows, scratch, logits ? &own : 0,
                        biases ? biases + from : 0);
    }
}
