/* Products with a factor F (t rows, ld apart) that is stored in bfloat16 or int8, and a step of Adam with
 * its penalty: one read of F each, widened in registers, accumulated in float32. Reading fewer bytes is the whole gain, so the
 * arithmetic must keep up with memory: four rows at a time, and column blocks that stay in the first-level cache. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 4096, STEP = 2048 }; /* columns in the first-level cache, and of all rows in the second */

static inline float widen_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float widen_int8(int8_t x) { return (float)x; }

static inline float widen_float32(float x) { return x; }

/* project: u += F d.    lift: g += alpha * F' u, the last columns first: they are still in the cache. */
#define DEFINE(NAME, TYPE)                                                                            \
    void project_##NAME(const TYPE *F, int64_t ld, int64_t t, int64_t n, const float *d, float *u) {  \
        for (int64_t first = 0; first < n; first += BLOCK) {                                          \
            int64_t width = n - first < BLOCK ? n - first : BLOCK, k = 0;                             \
            const float *x = d + first;                                                               \
            for (; k + 4 <= t; k += 4) {                                                              \
                const TYPE *a = F + k * ld + first, *b = a + ld, *c = b + ld, *e = c + ld;            \
                float s0 = 0, s1 = 0, s2 = 0, s3 = 0;                                                 \
                for (int64_t j = 0; j < width; j++) {                                                 \
                    s0 += widen_##NAME(a[j]) * x[j];                                                  \
                    s1 += widen_##NAME(b[j]) * x[j];                                                  \
                    s2 += widen_##NAME(c[j]) * x[j];                                                  \
                    s3 += widen_##NAME(e[j]) * x[j];                                                  \
                }                                                                                     \
                u[k] += s0, u[k + 1] += s1, u[k + 2] += s2, u[k + 3] += s3;                           \
            }                                                                                         \
            for (; k < t; k++) {                                                                      \
                const TYPE *a = F + k * ld + first;                                                   \
                float s = 0;                                                                          \
                for (int64_t j = 0; j < width; j++) s += widen_##NAME(a[j]) * x[j];                   \
                u[k] += s;                                                                            \
            }                                                                                         \
        }                                                                                             \
    }                                                                                                 \
                                                                                                      \
    void lift_##NAME(const TYPE *F, int64_t ld, int64_t t, int64_t n, const float *u, float alpha,    \
                     float *g) {                                                                      \
        float sum[BLOCK];                                                                             \
        for (int64_t first = (n - 1) / BLOCK * BLOCK; first >= 0; first -= BLOCK) {                   \
            int64_t width = n - first < BLOCK ? n - first : BLOCK, k = 0;                             \
            memset(sum, 0, sizeof sum);                                                               \
            for (; k + 4 <= t; k += 4) {                                                              \
                const TYPE *a = F + k * ld + first, *b = a + ld, *c = b + ld, *e = c + ld;            \
                float u0 = u[k], u1 = u[k + 1], u2 = u[k + 2], u3 = u[k + 3];                         \
                for (int64_t j = 0; j < width; j++)                                                   \
                    sum[j] += u0 * widen_##NAME(a[j]) + u1 * widen_##NAME(b[j]) +                     \
                              u2 * widen_##NAME(c[j]) + u3 * widen_##NAME(e[j]);                      \
            }                                                                                         \
            for (; k < t; k++) {                                                                      \
                const TYPE *a = F + k * ld + first;                                                   \
                for (int64_t j = 0; j < width; j++) sum[j] += u[k] * widen_##NAME(a[j]);              \
            }                                                                                         \
            for (int64_t j = 0; j < width; j++) g[first + j] += alpha * sum[j];                       \
        }                                                                                             \
    }

DEFINE(float32, float)
DEFINE(bfloat16, uint16_t)
DEFINE(int8, int8_t)

/* A step of Adam; moved becomes the difference, as rounded. */
static void adam(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                 float *restrict moved, int64_t n, float new1, float new2, float step_size, float root,
                 float epsilon) {
    memcpy(moved, p, n * sizeof *p);
    for (int64_t j = 0; j < n; j++) {
        m[j] += new1 * (g[j] - m[j]);
        v[j] += new2 * (g[j] * g[j] - v[j]);
        p[j] -= step_size * (m[j] / (sqrtf(v[j]) / root + epsilon));
    }
    for (int64_t j = 0; j < n; j++) moved[j] = p[j] - moved[j];
}

/* Adam with gradient g + F' w; moved += F (new parameters - old ones). A block of columns is used twice, the
 * second time from the cache. */
#define DEFINE_STEP(NAME, TYPE)                                                                       \
    void step_##NAME(const TYPE *F, int64_t ld, int64_t t, int64_t n, const float *w, float *moved,   \
                     float *point, const float *gradient, float *first, float *second, float new1,    \
                     float new2, float step_size, float root, float epsilon) {                        \
        float sum[STEP], change[STEP];                                                                \
        for (int64_t start = 0; start < n; start += STEP) {                                           \
            int64_t width = n - start < STEP ? n - start : STEP;                                      \
            memcpy(sum, gradient + start, width * sizeof *sum);                                       \
            lift_##NAME(F + start, ld, t, width, w, 1, sum);                                          \
            adam(point + start, sum, first + start, second + start, change, width, new1, new2,        \
                 step_size, root, epsilon);                                                           \
            project_##NAME(F + start, ld, t, width, change, moved);                                   \
        }                                                                                             \
    }

DEFINE_STEP(float32, float)
DEFINE_STEP(bfloat16, uint16_t)
DEFINE_STEP(int8, int8_t)
