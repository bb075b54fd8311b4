/* Products and attention of a few rows, bound by memory and not by arithmetic.
 *
 * A library's matrix product of 2 to 16 rows costs several times that of one row. Here a block of weight rows is read
 * once and used for all rows of x while it is in the cache. What a row of x gives depends on nothing but that row: every
 * sum runs in the same order whatever else is in the pass, so results are bit-identical with and without speculation.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define ROWS 4                                             /* rows of x that share a weight while it is in a register */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define COLUMNS 2                                          /* 16 registers: 8 sums, 4 of x, 1 weight */
#else
#define COLUMNS 4                                          /* 32 registers: 16 sums, 4 of x, 1 weight */
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX2__)
#include <immintrin.h>
#endif

INLINE vec load(const float *p) { return *(const vec *)p; }

INLINE vec load_int8(const int8_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

INLINE float total(vec v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

/* y[i, j] of `rows` rows of x and `columns` rows of w; both are constants at every call, so the loops unroll. */
INLINE void block(const float *x, const char *w, float *y, long k, long stride, int rows, int columns, int bytes) {
    vec sum[COLUMNS][ROWS];
    for (int j = 0; j < columns; j++)
        for (int i = 0; i < rows; i++) sum[j][i] = (vec){0};
    long p = 0;
    for (; p + LANES <= k; p += LANES) {
        vec a[ROWS];
        for (int i = 0; i < rows; i++) a[i] = load(x + i * k + p);
        for (int j = 0; j < columns; j++) {
            const char *at = w + (j * k + p) * bytes;
            __builtin_prefetch(at + columns * k * bytes, 0, 3); /* the next block, or two cores cannot keep up */
            vec b = bytes == 1 ? load_int8((const int8_t *)at) : load((const float *)at);
            for (int i = 0; i < rows; i++) sum[j][i] += a[i] * b;
        }
    }
    for (int j = 0; j < columns; j++)
        for (int i = 0; i < rows; i++) {
            float s = total(sum[j][i]);
            for (long q = p; q < k; q++) {
                const char *at = w + (j * k + q) * bytes;
                s += x[i * k + q] * (bytes == 1 ? (float)*(const int8_t *)at : *(const float *)at);
            }
            y[i * stride + j] = s;
        }
}

#define WITH_ROWS(columns, bytes)                                                    \
    switch (rows) {                                                                  \
    case 1: block(x, w, y, k, stride, 1, columns, bytes); break;                     \
    case 2: block(x, w, y, k, stride, 2, columns, bytes); break;                     \
    case 3: block(x, w, y, k, stride, 3, columns, bytes); break;                     \
    default: block(x, w, y, k, stride, ROWS, columns, bytes);                        \
    }

static void tile(const float *x, const char *w, float *y, long k, long stride, int rows, int columns, int bytes) {
    if (bytes == 1 && columns == COLUMNS) { WITH_ROWS(COLUMNS, 1) }
    else if (bytes == 1) { WITH_ROWS(1, 1) }
    else if (columns == COLUMNS) { WITH_ROWS(COLUMNS, 4) }
    else { WITH_ROWS(1, 4) }
}

/* One of several matrices that multiply the same rows; its columns of y begin at `first`. */
typedef struct {
    const char *weight; /* [n, k], float or int8 */
    const float *scale; /* [n], or none */
    const float *bias;  /* [n], or none */
    int64_t n, first;
} matrix;

/* y [m, stride] = x [m, k] times each matrix, transposed. */
void few_rows_linear(const float *x, float *y, const matrix *matrices, int64_t count, int64_t m, int64_t k) {
    long blocks = 0, stride = 0;
    for (long c = 0; c < count; c++) {
        blocks += (matrices[c].n + COLUMNS - 1) / COLUMNS;
        stride += matrices[c].n;
    }
#pragma omp parallel for schedule(static)
    for (long b = 0; b < blocks; b++) {
        long c = 0, j = b;
        while (j >= (matrices[c].n + COLUMNS - 1) / COLUMNS) j -= (matrices[c++].n + COLUMNS - 1) / COLUMNS;
        const matrix *w = matrices + c;
        const int bytes = w->scale ? 1 : 4;
        const long from = j * COLUMNS, to = from + COLUMNS < w->n ? from + COLUMNS : w->n;
        const int whole = to - from == COLUMNS;
        for (long i = 0; i < m; i += ROWS) {
            const int rows = m - i < ROWS ? m - i : ROWS;
            for (long column = from; column < to; column += whole ? COLUMNS : 1)
                tile(x + i * k, w->weight + column * k * bytes, y + i * stride + w->first + column, k, stride, rows,
                     whole ? COLUMNS : 1, bytes);
        }
        for (long i = 0; i < m; i++)
            for (long column = from; column < to; column++) {
                float *out = y + i * stride + w->first + column;
                if (w->scale) *out *= w->scale[column];
                if (w->bias) *out += w->bias[column];
            }
    }
}

typedef struct {
    const float *q;          /* [tokens, heads, dim] */
    const float *keys;       /* [pool, kv heads, dim], one of two sides of a layer */
    const float *values;
    const float *sinks;      /* [heads], or none */
    const int64_t *jobs;     /* [count, 4]: first token, tokens, where the row begins in the pool, committed entries */
    const int64_t *bits;     /* [tokens, words]: which of the entries of this pass a token sees */
    const int64_t *positions;/* [tokens] */
    float *out;              /* [tokens, heads, dim] */
    int64_t count, heads, kv_heads, dim, words, window;
    float scale, softcap;
} attention;

/* One query of one head over the entries `seen`, in the order of the text. */
static void attend(const attention *a, const float *q, long kv, const int64_t *seen, long count, float *weight,
                   const float *sink, float *out) {
    const long stride = a->kv_heads * a->dim, offset = kv * a->dim, dim = a->dim;
    float top = sink ? *sink : -3e38f, sum = 0;
    for (long i = 0; i < count; i++) {
        const float *key = a->keys + seen[i] * stride + offset;
        vec part = {0};
        long d = 0;
        for (; d + LANES <= dim; d += LANES) part += load(q + d) * load(key + d);
        float s = total(part);
        for (; d < dim; d++) s += q[d] * key[d];
        s *= a->scale;
        if (a->softcap > 0) s = tanhf(s / a->softcap) * a->softcap;
        weight[i] = s;
        if (s > top) top = s;
    }
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) {
        weight[i] = expf(weight[i] - top);
        sum += weight[i];
    }
    if (sink) sum += expf(*sink - top);
    for (long d = 0; d < dim; d++) out[d] = 0;
    for (long i = 0; i < count; i++) {
        const float *value = a->values + seen[i] * stride + offset;
        for (long d = 0; d < dim; d++) out[d] += weight[i] * value[d];
    }
    for (long d = 0; d < dim; d++) out[d] /= sum;
}

void few_rows_attention(const attention *a) {
    const long group = a->heads / a->kv_heads;
    long longest = 0;
    for (long j = 0; j < a->count; j++)
        if (a->jobs[4 * j + 3] > longest) longest = a->jobs[4 * j + 3];
    longest += 64 * a->words;
#pragma omp parallel
    {
        int64_t *seen = malloc(longest * sizeof(int64_t));
        float *weight = malloc(longest * sizeof(float));
        for (long j = 0; j < a->count; j++) {
            const int64_t *job = a->jobs + 4 * j;
#pragma omp for schedule(static) nowait
            for (long task = 0; task < job[1] * a->kv_heads; task++) {
                const long t = job[0] + task / a->kv_heads, kv = task % a->kv_heads;
                const long from = a->window ? a->positions[t] - a->window + 1 : 0;
                long count = 0;
                for (long i = from > 0 ? from : 0; i < job[3]; i++) seen[count++] = job[2] + i;
                for (long i = 0; i < 64 * a->words; i++)
                    if ((uint64_t)a->bits[t * a->words + i / 64] >> (i % 64) & 1) seen[count++] = job[2] + job[3] + i;
                for (long h = kv * group; h < (kv + 1) * group; h++)
                    attend(a, a->q + (t * a->heads + h) * a->dim, kv, seen, count, weight, a->sinks ? a->sinks + h : 0,
                           a->out + (t * a->heads + h) * a->dim);
            }
        }
        free(seen);
        free(weight);
    }
}
