/* One choice from a row of logits: temperature, filters and keyed Gumbel noise, in two or three passes over the row.
 *
 * The sampler in Python is the reference: it divides, sorts, and computes noise for every token. Here the row is read
 * where it lies. First the token with the best score of all is found; then the filters are asked whether they keep this
 * one token, which needs sums but no order. If one drops it, the search goes on among the tokens that may still be kept.
 * Sums are rounded differently than in the reference. Where rounding may decide, the answer is UNSURE, and the caller
 * asks the reference. A choice that is SURE is the reference's choice.
 *
 * A token's value is logit / temperature in float32, as in the reference. Thresholds on values are turned into
 * thresholds on logits, since dividing a row takes as long as reading it.
 */
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace {

enum Status { SURE = 0, UNSURE = 1, NOT_FINITE = 2 };

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
#define INLINE inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

constexpr long STEPS = 64;              // vectors of a block; lane i of all of them is a group of tokens
constexpr long BLOCK = STEPS * LANES;   // tokens
constexpr int HITS = 8;                 // vectors whose noise is tested together
constexpr int64_t MOST_K = 4096;        // of `top_k`, if the tokens that it keeps are listed
constexpr int CUTS = 6;                 // thresholds that one pass compares with
constexpr int PASSES = 6;
constexpr size_t MOST = 1 << 14;        // tokens at a threshold, or in a list
constexpr int ATTEMPTS = 64;            // tokens that filters may drop, one after the other
constexpr double EXACT = 1e-9;          // rounding of sums in double, and of logarithms in scores
constexpr double LN2 = 0.69314718055994530942;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float MOST_NOISE = 23;        // Gumbel noise of a word is smaller

/* A change of some logits, made before all else. */
struct Edit {
    int64_t kind, count;     // of the tokens
    const int64_t *tokens;   // of `KEEP`: bits, the lowest first
    const double *values;    // of `PENALIZE` one, of `ADD` one for each token
};

enum Kind { PENALIZE = 0, ADD = 1, FORBID = 2, KEEP = 3 };

struct Settings {
    float temperature;               // 0: the largest logit is the choice
    int64_t top_k;                   // 0: none
    double top_p, min_p, typical_p;  // 1, 0 and 1: none
    uint32_t a, b;                   // words of the noise of this position
    int64_t edit_count;
    const Edit *edits;
};

/* A row of logits, with the largest of each group. */
struct Row {
    const float *x;
    long n;
    float temperature, rate;   // rate: what a logit is in powers of two
    float largest, top;        // logit, and value
    double mass_error;         // of a share of the weights, which are float32
    double total, center;      // of the weights exp(value - top); the mean of top - value
    std::vector<float> tops;   // [blocks, lanes]
    float value(float logit) const { return logit / temperature; }
    long blocks() const { return (n + BLOCK - 1) / BLOCK; }
};

/* Logits of at least `sure` are kept, and those below `least` dropped. Between them rounding decides. */
struct Bound {
    float least = -INFINITE, sure = -INFINITE;
    double doubted = 0;  // at most, the mass in between
    void raise(Bound other) {
        least = std::max(least, other.least), sure = std::max(sure, other.sure), doubted += other.doubted;
    }
};

struct Range {
    float low, high;  // of logits, both included
};

INLINE vec all(float value) { return (vec){} + value; }
INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE vec smaller(vec a, vec b) { return a < b ? a : b; }
INLINE vec larger(vec a, vec b) { return a > b ? a : b; }

INLINE bool any(ints mask) {
    int64_t parts[LANES / 2], found = 0;
    memcpy(parts, &mask, sizeof parts);
    for (int64_t part : parts) found |= part;
    return found;
}

/* Sums of vectors in double, each lane on its own until the end. */
struct Total {
    double lanes[LANES] = {};

    INLINE void add(vec v) {
        float parts[LANES];
        memcpy(parts, &v, sizeof parts);
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += parts[lane];
    }

    double value() const {
        double all = 0;
        for (double lane : lanes) all += lane;
        return all;
    }
};

/* The vector at token i; where the row ends, -infinity. */
INLINE vec load(const Row &row, long i) {
    if (i + LANES <= row.n) return load(row.x + i);
    vec v = all(-INFINITE);
    for (int lane = 0; i + lane < row.n; lane++) v[lane] = row.x[i + lane];
    return v;
}

/* Calls body(vector, its first token) for each vector of a block. */
template <typename Body> INLINE void each_vector(const Row &row, long block, Body body) {
    const long first = block * BLOCK;
    if (first + BLOCK <= row.n)
        for (long i = first; i < first + BLOCK; i += LANES) body(load(row.x + i), i);
    else
        for (long i = first; i < row.n; i += LANES) body(load(row, i), i);
}

/* 2 to the power of x, for DEEPEST <= x <= 0, with a relative error of 1e-7. */
INLINE vec power(vec x) {
    const vec shifted = x + 12582912.0f;  // rounded to a whole number, in its lowest bits
    const vec rest = x - (shifted - 12582912.0f);
    vec sum = rest * 1.33908863e-3f + 9.67605514e-3f;
    sum = sum * rest + 5.55035707e-2f;
    sum = sum * rest + 2.40221070e-1f;
    sum = sum * rest + 6.93147188e-1f;
    sum = sum * rest + 1.0f;
    return (vec)((ints)sum + ((ints)shifted << 23));
}

constexpr float DEEPEST = -125;

/* The distance of logits from one that is no smaller, in powers of two. */
INLINE vec below(const Row &row, vec x, vec reference) { return larger((x - reference) * row.rate, all(DEEPEST)); }

INLINE vec weight(const Row &row, vec x) { return power(below(row, x, all(row.largest))); }

/* Keyed noise */

template <typename Words> INLINE Words mix(Words x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

constexpr uint32_t STRIDE = 0x9E3779B1u;  // between the words of two tokens, before they are mixed

INLINE uint32_t word(uint32_t token, const Settings &s) { return mix(mix(token * STRIDE + s.a) ^ s.b); }

INLINE double score(float value, uint32_t noise) {
    return double(value) - std::log(-std::log((double(noise) + 0.5) / 4294967296.0));
}

/* The best score so far, and the second best. */
struct Best {
    long at = -1;
    double score = -INFINITE, second = -INFINITE;
    void offer(long i, double value) {
        if (value > score)
            second = score, score = value, at = i;
        else if (value > second)
            second = value;
    }
    double tie() const { return EXACT * (1 + std::fabs(score)); }
    double floor() const { return at < 0 ? -INFINITE : score - tie(); }  // of scores that matter
    bool certain() const { return at >= 0 && score - second >= tie(); }
};

/* Passes over the row */

/* Finds the largest logit of each group; with `weigh`, sums the weights. False if a logit is NaN or none is finite. */
bool survey(Row &row, bool weigh) {
    static thread_local std::vector<float> sums, spreads;  // [blocks, lanes], relative to the group's largest
    const long size = row.blocks() * LANES;
    row.tops.resize(size);
    if (weigh) sums.resize(size), spreads.resize(size);
    vec most = all(-INFINITE);
    ints bits = {};
    for (long b = 0; b < row.blocks(); b++) {
        vec top = all(-INFINITE);
        each_vector(row, b, [&](vec x, long) {
            const ints size = (ints)x & 0x7FFFFFFF;
            top = larger(x, top), bits = size > bits ? size : bits;
        });
        most = larger(top, most);
        memcpy(&row.tops[b * LANES], &top, sizeof top);
        if (!weigh) continue;
        vec sum = {}, spread = {};
        const vec reference = larger(top, all(LOWEST));
        each_vector(row, b, [&](vec x, long) {
            const vec far = below(row, x, reference), weight = power(far);
            sum += weight, spread -= weight * far;
        });
        memcpy(&sums[b * LANES], &sum, sizeof sum), memcpy(&spreads[b * LANES], &spread, sizeof spread);
    }
    float largest = -INFINITE;
    bool nan = false;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]), nan |= bits[lane] > 0x7F800000;
    row.largest = largest, row.top = row.value(largest);
    if (nan || !std::isfinite(row.top)) return false;
    row.mass_error = 1e-5 + 2e-7 * std::fabs(row.top);
    if (!weigh) return true;
    Total total, spread;
    for (long i = 0; i < size; i += LANES) {
        const vec far = below(row, larger(load(&row.tops[i]), all(LOWEST)), all(largest));
        const vec scale = power(far), part = scale * load(&sums[i]);
        total.add(part), spread.add(scale * load(&spreads[i]) - part * far);
    }
    row.total = total.value(), row.center = spread.value() * LN2 / row.total;
    return true;
}

/* Calls body(vector, its first token) for each vector of the blocks in which some logit is at least `low`. */
template <typename Body, typename After> INLINE void above(const Row &row, float low, Body body, After after) {
    for (long b = 0; b < row.blocks(); b++) {
        if (!any(load(&row.tops[b * LANES]) >= low)) continue;
        each_vector(row, b, body);
        after();
    }
}

/* The number of tokens with a logit of at least `low`. */
int64_t count_from(const Row &row, float low) {
    int64_t count = 0;
    ints part = {};
    above(row, low, [&](vec x, long) { part -= x >= low; }, [&] {
        for (int lane = 0; lane < LANES; lane++) count += part[lane];
        part = (ints){};
    });
    return count;
}

/* The weight of the tokens with a logit of at least `low`, and their mean distance from the top value. */
double mass_from(const Row &row, float low, double *center = nullptr) {
    Total total, spread;
    vec part = {}, far = {};
    above(row, low, [&](vec x, long) {
        const vec distance = below(row, x, all(row.largest)), one = x >= low ? power(distance) : (vec){};
        part += one, far -= one * distance;
    }, [&] { total.add(part), spread.add(far), part = far = (vec){}; });
    if (center) *center = spread.value() * LN2 / total.value();
    return total.value();
}

/* The weight of the tokens with a logit between two bounds, for an inner and for an outer pair. The outer one leaves out
 * the logits from `own` to just before `next`. */
std::pair<double, double> mass_between(const Row &row, Range inner, Range outer, float own, float next) {
    Total totals[2];
    vec parts[2] = {};
    above(row, outer.low, [&](vec x, long) {
        const vec one = weight(row, x);
        parts[0] += (x > inner.low) & (x < inner.high) ? one : (vec){};
        parts[1] += (x > outer.low) & (x < outer.high) & ((x < own) | (x >= next)) ? one : (vec){};
    }, [&] {
        for (int i = 0; i < 2; i++) totals[i].add(parts[i]), parts[i] = (vec){};
    });
    return {totals[0].value(), totals[1].value()};
}

/* Tests the noise of a block: a token with the uniform number u can only have a score of `floor` if
 * 1 - u <= exp(value - floor). The bound of a group holds for all of its tokens. */
struct NoiseTest {
    ints most;      // of the distance of a token's word from the last word, in steps of two
    bool possible;  // whether any word passes
    NoiseTest(const Row &row, vec tops, double floor, float slack) {
        const vec far = smaller(tops * row.rate - float(floor / LN2), (vec){});
        const vec bound = power(larger(far, all(DEEPEST))) * (2147483648.0f * slack);
        most = __builtin_convertvector(smaller(bound, all(2147483520.0f)), ints);
        most = bound >= 2147483520.0f ? (ints){} + 0x7FFFFFFF : most + 1;
        possible = any(bound > 0.1f);
    }
};

/* The token with the best score in a range of logits. */
Best search(const Row &row, const Settings &s, Range range) {
    Best best;
    const float slack = 1.001f + 1e-6f * std::fabs(row.top);
    auto offer = [&](long i) {
        const float x = row.x[i];
        if (!(x >= range.low && x <= range.high)) return;
        const float value = row.value(x);
        if (value + MOST_NOISE > best.floor()) best.offer(i, score(value, word(uint32_t(i), s)));
    };
    words lane;
    for (int i = 0; i < LANES; i++) lane[i] = uint32_t(i) * STRIDE + s.a;
    for (long b = 0; b < row.blocks(); b++) {
        const vec tops = load(&row.tops[b * LANES]);
        if (!any(tops >= range.low)) continue;
        const NoiseTest test(row, smaller(tops, all(range.high)), best.floor(), slack);
        if (!test.possible) continue;
        const long first = b * BLOCK, end = std::min(row.n, first + BLOCK);
        for (long i = first; i < end; i += HITS * LANES) {
            ints hits[HITS], hit = {};
            for (int j = 0; j < HITS; j++) {
                const words noise = mix(mix(lane + uint32_t(i + j * LANES) * STRIDE) ^ s.b);
                hits[j] = (ints)(~noise >> 1) <= test.most, hit |= hits[j];
            }
            if (!any(hit)) continue;
            for (int j = 0; j < HITS; j++)
                for (int k = 0; any(hits[j]) && k < LANES; k++)
                    if (hits[j][k] && i + j * LANES + k < end) offer(i + j * LANES + k);
        }
    }
    return best;
}

/* Thresholds */

/* The smallest number that passes a test which all larger ones pass, too. */
template <typename Test> float first(Test test) {
    auto number = [](int64_t order) {  // floats in their order, as whole numbers
        const int32_t bits = int32_t(order < 0 ? order ^ 0x7FFFFFFF : order);
        float found;
        memcpy(&found, &bits, 4);
        return found;
    };
    int64_t low = -0x7F800001, high = 0x7F800000;  // -infinity and infinity
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        (test(number(middle)) ? high : low) = middle;
    }
    return number(high);
}

/* The smallest logit whose value is at least this. */
float first_from(const Row &row, double value) {
    return first([&](float logit) { return row.value(logit) >= value; });
}

/* The smallest logit with the same value as this one, and the smallest one with a larger value. */
struct Ties {
    float own, next;
    Ties(const Row &row, float logit) {
        const float value = row.value(logit);
        own = first_from(row, value), next = first_from(row, std::nextafter(value, INFINITE));
    }
};

/* Some tokens of a row. */
struct Gathered {
    std::vector<float> logits;
    std::vector<uint32_t> tokens;
    size_t count;  // may exceed MOST; then not all are here

    /* Takes the tokens with a logit from `low` to just before `high`. */
    void gather(const Row &row, float low, float high) {
        count = 0, logits.resize(MOST + LANES), tokens.resize(MOST + LANES);
        above(row, low, [&](vec x, long i) {
            const ints hits = (x >= low) & (x < high);
            if (!any(hits)) return;
            for (int lane = 0; lane < LANES; lane++) {  // without branches, which cannot be predicted here
                const size_t place = std::min(count, MOST);
                logits[place] = x[lane], tokens[place] = uint32_t(i + lane), count -= hits[lane];
            }
        }, [] {});
    }

    bool complete() const { return count <= MOST; }
};

typedef std::pair<float, uint32_t> Token;  // value, token

/* Of equal values the first token comes first. */
bool likelier(const Token &a, const Token &b) { return a.first > b.first || (a.first == b.first && a.second < b.second); }

/* Lists at least the k likeliest tokens, and all with the value of the last of them. False if these are too many. */
bool list(const Row &row, int64_t k, std::vector<Token> &found) {
    static thread_local std::vector<float> tops;
    static thread_local Gathered few;
    float low = LOWEST;
    if (k <= int64_t(row.tops.size())) {  // as many groups have a token of at least this
        tops = row.tops;
        std::nth_element(tops.begin(), tops.begin() + (k - 1), tops.end(), std::greater<>());
        low = std::max(low, first_from(row, row.value(tops[k - 1])));
    }
    few.gather(row, low, INFINITE);
    found.clear();
    for (size_t i = 0; i < few.count && few.complete(); i++) found.emplace_back(row.value(few.logits[i]), few.tokens[i]);
    return few.complete();
}

/* Some logits and what each stands for, in whole vectors. */
struct Sample {
    std::vector<float> logits, masses;
    double total;

    void clear() { logits.clear(), masses.clear(); }

    void add(float logit, float mass) { logits.push_back(logit), masses.push_back(mass); }

    void finish(const Row &row, bool weighed) {
        while (logits.size() % LANES) add(-INFINITE, 0);
        for (size_t i = 0; i < logits.size(); i += LANES) {
            const vec x = load(&logits[i]), one = weighed ? weight(row, x) : all(1.0f);
            const vec weights = x > -INFINITE ? load(&masses[i]) * one : (vec){};
            memcpy(&masses[i], &weights, sizeof weights);
        }
        total = from(-INFINITE);
    }

    /* The mass of the logits of at least `low`. */
    double from(float low) const {
        vec part = {};
        for (size_t i = 0; i < logits.size(); i += LANES) part += load(&logits[i]) >= low ? load(&masses[i]) : (vec){};
        Total total;
        total.add(part);
        return total.value();
    }

    /* The smallest logit from which on there is less than this mass. */
    float least(double mass) const {
        return first([&](float logit) { return from(logit) < mass; });
    }
};

/* Thresholds below and above which the mass from a threshold on probably is this share. The largest logit of each group
 * is known, and another one stands for the rest of the group. */
Range guess(const Row &row, bool weighed, double share) {
    static thread_local Sample sample;
    sample.clear();
    for (long b = 0; b < row.blocks(); b++)
        for (int lane = 0; lane < LANES; lane++) {
            const float top = row.tops[b * LANES + lane], x = top > -INFINITE ? row.x[b * BLOCK + lane] : top;
            sample.add(x < top ? x : -INFINITE, STEPS - 1);
        }
    const size_t rest = sample.logits.size();
    for (float top : row.tops) sample.add(top, 1);
    sample.finish(row, weighed);
    double squares = 0;
    for (size_t i = 0; i < rest; i++) squares += double(sample.masses[i]) * sample.masses[i];
    const double error = 0.002 + 3 * std::sqrt(share * std::max(0.0, 1 - share) * squares) / sample.total;
    return {sample.least(std::min(share + error, 0.999) * sample.total), sample.least((share - error) * sample.total)};
}

/* The mass of all tokens from each cut on. */
void masses(const Row &row, bool weighed, const float *cuts, double *found) {
    vec parts[CUTS] = {};
    Total totals[CUTS];
    above(row, cuts[CUTS - 1], [&](vec x, long) {
        const vec one = weighed ? weight(row, x) : all(1.0f);
        for (int i = 0; i < CUTS; i++) parts[i] += x >= cuts[i] ? one : (vec){};
    }, [&] {
        for (int i = 0; i < CUTS; i++) totals[i].add(parts[i]), parts[i] = (vec){};
    });
    for (int i = 0; i < CUTS; i++) found[i] = totals[i].value();
}

/* Keeps the likeliest tokens until those before one hold a mass between `from` and `to`. Tokens with equal values stay or
 * go together. False if too many tokens are close to the threshold. */
bool threshold(const Row &row, bool weighed, double from, double to, Bound &found) {
    static thread_local Gathered near;
    static thread_local Sample sample;
    from = std::max(from, std::numeric_limits<double>::min());  // the likeliest are always kept
    float cuts[CUTS];
    double held[CUTS], before = 0;                              // before: the mass from the upper end on
    Range bounds{-INFINITE, Ties(row, row.largest).next};       // it is at least the lower and below the upper one
    Range tried = guess(row, weighed, from / (weighed ? row.total : double(row.n)));
    for (int pass = 0; pass < PASSES; pass++) {
        const float high = std::min(tried.high, row.largest), low = std::min(std::max(tried.low, LOWEST), high);
        for (int i = 0; i < CUTS; i++) cuts[i] = first_from(row, row.value(high + (low - high) * (float(i) / (CUTS - 1))));
        masses(row, weighed, cuts, held);
        for (int i = CUTS - 1; i >= 0; i--)
            if (held[i] > to && cuts[i] > bounds.low) bounds.low = cuts[i];
        for (int i = 0; i < CUTS; i++)
            if (held[i] < from && cuts[i] < bounds.high && cuts[i] > bounds.low) bounds.high = cuts[i], before = held[i];
        near.gather(row, std::max(bounds.low, LOWEST), bounds.high);
        if (near.complete()) {
            sample.clear();
            for (size_t i = 0; i < near.count; i++) sample.add(near.logits[i], 1);
            sample.finish(row, weighed);
            auto kept = [&](double mass) {
                const float last = std::nextafter(sample.least(mass - before), -INFINITE);
                return std::max(bounds.low, first_from(row, row.value(last)));
            };
            found = {kept(to), kept(from), 0};
            found.doubted = sample.from(found.least) - sample.from(found.sure);
            return true;
        }
        tried = bounds.low > -INFINITE ? bounds : Range{low - 4 * (high - low + row.temperature), low};
    }
    return false;
}

/* Choices */

/* The choice among listed tokens, which hold all that `top_k` keeps. As the reference does it: sorted, in double. */
Status choose_listed(std::vector<Token> &few, const Settings &s, int64_t &token) {
    static thread_local std::vector<double> below, weights;  // the distance from the top value; exp(-distance)
    static thread_local std::vector<uint32_t> order;
    std::sort(few.begin(), few.end(), likelier);
    size_t kept = few.size();
    for (; kept > size_t(s.top_k) && few[kept - 1].first != few[s.top_k - 1].first; kept--) {}
    below.resize(kept), weights.resize(kept), order.resize(kept);
    double total = 0;
    for (size_t i = 0; i < kept; i++)
        total += weights[i] = std::exp(-(below[i] = double(few[0].first) - few[i].first)), order[i] = uint32_t(i);
    bool doubtful = false;
    /* How many tokens of an order are kept by their mass. Those that are equally far stay or go together. */
    auto within = [&](double mass, auto distance) {
        double before = 0;
        for (size_t i = 0, end; i < kept; i = end) {
            double group = 0;
            bool equal = true;
            for (end = i; end < kept && distance(order[end]) - distance(order[i]) <= EXACT; end++)
                group += weights[order[end]], equal &= few[order[end]].first == few[order[i]].first;
            doubtful |= i && std::fabs(before - mass * total) < EXACT * total;
            if (before >= mass * total) return i;
            before += group;
            doubtful |= !equal && before >= (mass - EXACT) * total;
        }
        return kept;
    };
    if (s.top_p < 1) kept = within(s.top_p, [&](uint32_t i) { return below[i]; });
    if (s.min_p > 0) {
        const double most = -std::log(s.min_p);
        for (; kept > 1 && below[kept - 1] > most + EXACT; kept--) {}
        doubtful |= below[kept - 1] && below[kept - 1] > most - EXACT;
    }
    if (s.typical_p < 1) {
        double spread = total = 0;
        for (size_t i = 0; i < kept; i++) total += weights[i], spread += weights[i] * below[i];
        auto distance = [&, center = spread / total](uint32_t i) { return std::fabs(below[i] - center); };
        std::sort(order.begin(), order.begin() + kept, [&](uint32_t a, uint32_t b) { return distance(a) < distance(b); });
        kept = within(s.typical_p, distance);
    }
    Best best;
    for (size_t i = 0; i < kept; i++) {
        const auto [value, at] = few[order[i]];
        if (value + MOST_NOISE > best.floor()) best.offer(at, score(value, word(at, s)));
    }
    token = best.at;
    return best.certain() && !doubtful ? SURE : UNSURE;
}

/* Whether a filter keeps the token with the best score. If not, `range` becomes that of the tokens that may be kept. */
enum Verdict { KEPT, DROPPED, DOUBTFUL };

Verdict by_count(const Row &row, int64_t k, Ties ties, Range &range) {
    if (count_from(row, ties.next) < k) return KEPT;
    range.low = ties.next;
    return DROPPED;
}

Verdict by_mass(const Row &row, double share, Ties ties, Range &range) {
    const double held = mass_from(row, ties.next) / row.total;
    if (held <= 0 || held < share - row.mass_error) return KEPT;
    if (held < share + row.mass_error) return DOUBTFUL;
    range.low = ties.next;
    return DROPPED;
}

/* `error` is that of the center. */
Verdict by_typicality(const Row &row, double share, float logit, Ties ties, double error, Bound kept, Range &range) {
    const double distance = std::fabs(double(row.top) - row.value(logit) - row.center);
    auto around = [&](double far) {
        const double middle = row.largest - row.center * row.temperature, reach = far * row.temperature;
        return Range{std::max(float(middle - reach), std::nextafter(kept.sure, -INFINITE)), float(middle + reach)};
    };
    error += 2e-7 * (std::fabs(row.top) + row.center + distance);  // and of a distance from it
    const auto [surely, perhaps] = mass_between(row, around(distance - 3 * error), around(distance + 2 * error), ties.own, ties.next);
    if (perhaps < (share - row.mass_error) * row.total) return KEPT;
    if (surely < (share + row.mass_error) * row.total) return DOUBTFUL;
    const Range nearer = around(distance - error);
    range = {std::max(range.low, nearer.low), std::min(range.high, nearer.high)};
    return DROPPED;
}

Status choose_whole(Row &row, const Settings &s, int64_t &token) {
    const bool typical = s.typical_p < 1, top_p = s.top_p < 1, top_k = s.top_k && s.top_k < row.n;
    Bound kept;
    if (top_k && (top_p || typical)) {
        if (!threshold(row, false, s.top_k - 0.5, s.top_k - 0.5, kept)) return UNSURE;
        row.total = mass_from(row, kept.sure);
    }
    if (top_p && typical) {
        Bound found;
        if (!threshold(row, true, (s.top_p - row.mass_error) * row.total, (s.top_p + row.mass_error) * row.total, found))
            return UNSURE;
        kept.raise(found);
    }
    if (s.min_p > 0) {
        const double cut = std::log(s.min_p) + row.top, error = EXACT * (1 + std::fabs(cut));
        const float least = first_from(row, cut - error), sure = first_from(row, std::min(cut + error, double(row.top)));
        kept.raise({least, sure, least < sure && typical ? mass_from(row, least) - mass_from(row, sure) : 0});
    }
    double error = 0;  // of the center
    if (typical && kept.least > -INFINITE) {
        row.total = mass_from(row, kept.sure, &row.center);
        if (kept.least < kept.sure) {
            const double doubted = kept.doubted / row.total;
            error = 2 * doubted * (1 + double(row.top) - row.value(kept.least)), row.mass_error += 2 * doubted;
        }
    }
    error += 1e-6 + 4 * row.mass_error * std::min(row.center, 1.0);
    Range range{std::max(kept.least, LOWEST), row.largest};
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        const Best best = search(row, s, range);
        if (!best.certain() || row.x[best.at] < kept.sure) return UNSURE;
        token = best.at;
        const float logit = row.x[best.at];
        const Ties ties(row, logit);
        Verdict verdict = KEPT;
        if (top_k && !top_p && !typical) verdict = by_count(row, s.top_k, ties, range);
        if (verdict == KEPT && top_p && !typical) verdict = by_mass(row, s.top_p, ties, range);
        if (verdict == KEPT && typical) verdict = by_typicality(row, s.typical_p, logit, ties, error, kept, range);
        if (verdict != DROPPED) return verdict == KEPT ? SURE : UNSURE;
    }
    return UNSURE;
}

/* Excludes the tokens whose bit is not set, and all from `known` on. */
void keep(const uint8_t *bits, int64_t known, float *x, int64_t n) {
    constexpr int BYTES = (LANES + 7) / 8;
    const int64_t end = std::min(n, known);
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = 1 << i;
    int64_t i = 0;
    for (; i + LANES <= end; i += LANES) {
        uint32_t word = 0;
        memcpy(&word, bits + i / 8, BYTES);
        const ints kept = ((ints){} + int32_t(word >> i % 8)) & lane;
        const vec some = kept != 0 ? load(x + i) : all(-INFINITE);
        memcpy(x + i, &some, sizeof some);
    }
    for (; i < end; i++) x[i] = bits[i / 8] >> i % 8 & 1 ? x[i] : -INFINITE;
    std::fill(x + end, x + n, -INFINITE);
}

/* Changes logits as torch does, in float32. False if a token is none of this row. */
bool apply(const Edit &edit, float *x, int64_t n) {
    if (edit.kind == KEEP) {
        keep(reinterpret_cast<const uint8_t *>(edit.tokens), edit.count, x, n);
        return true;
    }
    for (int64_t i = 0; i < edit.count; i++) {
        if (edit.tokens[i] < 0 || edit.tokens[i] >= n) return false;
        float &logit = x[edit.tokens[i]];
        if (edit.kind == PENALIZE)
            logit = logit < 0 ? logit * float(edit.values[0]) : logit / float(edit.values[0]);
        else
            logit = edit.kind == ADD ? logit + float(edit.values[i]) : -INFINITE;
    }
    return true;
}

/* The first token with the largest logit. */
int64_t first_largest(const Row &row) {
    for (long b = 0; b < row.blocks(); b++)
        if (any(load(&row.tops[b * LANES]) == row.largest))
            return std::find(row.x + b * BLOCK, row.x + row.n, row.largest) - row.x;
    return -1;
}

Row &row_of(const float *x, int64_t n, float temperature) {
    static thread_local Row row;
    row.x = x, row.n = n, row.temperature = temperature, row.rate = float(1 / (LN2 * temperature));
    return row;
}

}  // namespace

extern "C" int outpace_choose(const float *logits, int64_t n, const Settings *settings, int64_t *token) {
    static thread_local std::vector<Token> few;
    static thread_local std::vector<float> edited;
    const Settings &s = *settings;
    const float temperature = s.temperature ? s.temperature : 1;
    if (s.edit_count) {
        if (!survey(row_of(logits, n, 1), false)) return NOT_FINITE;
        edited.assign(logits, logits + n);
        for (int64_t i = 0; i < s.edit_count; i++)
            if (!apply(s.edits[i], edited.data(), n)) return UNSURE;
        logits = edited.data();
    }
    Row &row = row_of(logits, n, temperature);
    const bool listed = s.top_k && s.top_k < n && s.top_k <= MOST_K && (s.top_k <= row.blocks() * LANES / 2 || n <= MOST_K);
    if (!survey(row, s.temperature && !listed && (s.top_p < 1 || s.typical_p < 1))) return NOT_FINITE;
    if (!s.temperature) {
        *token = first_largest(row);
        return SURE;
    }
    if (!listed) return choose_whole(row, s, *token);
    return list(row, s.top_k, few) ? choose_listed(few, s, *token) : UNSURE;
}

/* The first token with the largest logit of each row, and that logit. False where a row is not finite. */
extern "C" int outpace_largest(const float *x, int64_t rows, int64_t n, int64_t *tokens, float *logits) {
    for (int64_t i = 0; i < rows; i++) {
        Row &row = row_of(x + i * n, n, 1);
        if (!survey(row, false)) return false;
        tokens[i] = first_largest(row), logits[i] = row.largest;
    }
    return true;
}

namespace {

/* exp for -700 <= x <= 0, with an error of a few units in the last place of a double. */
INLINE double precise_exp_of(double x) {
    double whole = x * 1.4426950408889634 + 6755399441055744.0;  // rounded to a whole number, in its lowest bits
    int64_t bits;
    memcpy(&bits, &whole, 8);
    whole -= 6755399441055744.0;
    const double rest = x - whole * 6.93147180369123816490e-01 - whole * 1.90821492927058770002e-10;
    double sum = 2.7626371065696356e-7;  // the polynomial of this degree that is closest to exp where |rest| < 0.35
    for (double factor : {2.7640197391694841e-6, 2.4801504313785540e-5, 1.9841170230570287e-4, 1.3888888932514780e-3,
                          8.3333333856992117e-3, 4.1666666666573068e-2, 1.6666666666554315e-1, 5.0000000000000056e-1,
                          1.0000000000000067, 1.0})
        sum = sum * rest + factor;
    const int64_t scale = (bits - 0x4338000000000000 + 1023) << 52;
    double power;
    memcpy(&power, &scale, 8);
    return sum * power;
}

/* exp(x - largest) in float64, and its exponent; tokens that are excluded weigh nothing. */
struct Term {
    double below, weight;
    INLINE Term(float x, float largest) {
        const double given = double(x) - double(largest);
        below = given < -700.0 ? -700.0 : given;
        const double exact = precise_exp_of(below);
        weight = given < -700.0 ? 0.0 : exact;
    }
};

/* The k likeliest tokens of a row, the likeliest first; of equal ones the first. */
void likeliest(const Row &row, int64_t k, int64_t *found) {
    static thread_local std::vector<Token> few;
    few.clear();
    if (k && !list(row, k, few))  // too many equal ones
        for (int64_t i = 0; i < row.n; i++) few.emplace_back(row.x[i], uint32_t(i));
    for (int64_t i = 0; i < row.n && int64_t(few.size()) < k; i++)
        if (!(row.x[i] > -INFINITE)) few.emplace_back(-INFINITE, uint32_t(i));
    std::partial_sort(few.begin(), few.begin() + k, few.end(), likelier);
    for (int64_t i = 0; i < k; i++) found[i] = few[i].second;
}

}  // namespace

extern "C" void outpace_top_k(const float *x, int64_t rows, int64_t n, int64_t k, int64_t *found) {
    for (int64_t i = 0; i < rows; i++) {
        Row &row = row_of(x + i * n, n, 1);
        survey(row, false);
        likeliest(row, k, found + i * k);
    }
}

/* The log-probabilities of a token and of the k likeliest ones, and the entropy. All sums are float64. False where the
 * row is not finite. `logs` holds the entropy, the token's own, and one for each of `tokens`. */
extern "C" int outpace_logprobs(const float *x, int64_t n, int64_t token, int64_t k, int64_t *tokens, double *logs) {
    constexpr int PARALLEL = 16;
    Row &row = row_of(x, n, 1);
    if (!survey(row, false)) return false;
    const float largest = row.largest;
    double weight[PARALLEL] = {}, spread[PARALLEL] = {};  // of exp(x - largest), and of that times (x - largest)
    int64_t at = 0;
    for (; at + PARALLEL <= n; at += PARALLEL)
        for (int lane = 0; lane < PARALLEL; lane++) {
            const Term term(x[at + lane], largest);
            weight[lane] += term.weight, spread[lane] += term.weight * term.below;
        }
    for (; at < n; at++) {
        const Term term(x[at], largest);
        weight[0] += term.weight, spread[0] += term.weight * term.below;
    }
    double total = 0, mean = 0;
    for (int lane = 0; lane < PARALLEL; lane++) total += weight[lane], mean += spread[lane];
    const double log_sum = std::log(total);
    logs[0] = log_sum - mean / total, logs[1] = double(x[token]) - largest - log_sum;
    likeliest(row, k, tokens);
    for (int64_t i = 0; i < k; i++) logs[2 + i] = double(x[tokens[i]]) - largest - log_sum;
    return true;
}
