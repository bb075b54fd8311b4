/* One choice from a row of logits: temperature, filters and keyed Gumbel noise, in a few passes over the row.
 *
 * The sampler in Python is the reference: it sorts the row, and computes noise for every token. Here a filter becomes a
 * threshold, found without sorting, and noise is turned into a logarithm only for tokens that may still win. Sums are
 * rounded differently than in the reference. Where rounding may decide, the answer is UNSURE, and the caller asks the
 * reference. A choice that is SURE is the reference's choice.
 *
 * Inner loops run over LANES independent numbers, so the compiler can use vector registers without reordering a sum.
 */
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace {

enum Status { SURE = 0, UNSURE = 1, NOT_FINITE = 2 };

constexpr int LANES = 16;
constexpr long BLOCK = 1024;             // tokens that are tested together
constexpr double MASS_ERROR = 1e-5;      // of a share of the weights, which are float32
constexpr double SHARE_ERROR = 1e-6;     // of the logarithm of a ratio of two probabilities
constexpr double SURPRISE_ERROR = 1e-4;  // of |-log p - entropy|
constexpr double TIE = 1e-9;             // scores this close may be ordered by the rounding of a logarithm
constexpr int CUTS = 8;                  // thresholds that one pass compares with
constexpr int PASSES = 3;
constexpr float COARSE[CUTS] = {0.0625f, 0.25f, 1, 2, 4, 8, 16, 32};  // below the largest value
constexpr size_t MOST = 1 << 16;         // tokens to sort at a threshold
const float INFINITE = std::numeric_limits<float>::infinity();

struct Settings {
    float temperature;
    int64_t top_k;                   // 0: none
    double top_p, min_p, typical_p;  // 1, 0 and 1: none
    uint32_t a, b;                   // words of the noise of this position
};

constexpr int64_t MOST_K = 256;          // of `top_k`, if the tokens that it keeps are to be found in one pass

struct Row {
    std::vector<float> logits, weights, typical;  // after the temperature; exp(logit - largest); -|surprise - entropy|
    std::vector<uint32_t> tokens;                 // of a row that holds some of the vocabulary; else empty
    float largest;
    double total;  // of the weights
    long size() const { return long(logits.size()); }
};

/* Tokens with a value of at least `sure` are kept. Those from `least` to `sure` are decided by rounding. */
struct Threshold {
    float least = -INFINITE, sure = -INFINITE;
    void raise(const Threshold &other) { least = std::max(least, other.least), sure = std::max(sure, other.sure); }
};

inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

inline uint32_t word(uint32_t token, const Settings &s) { return mix(mix(token * 0x9E3779B1u + s.a) ^ s.b); }

inline double score(float logit, uint32_t noise) {
    return double(logit) - std::log(-std::log((double(noise) + 0.5) / 4294967296.0));
}

/* At most 2^32 (1 - u), where u is the uniform number of the noise. */
inline float distance(uint32_t noise) { return float(int32_t(~noise >> 1)) * 2.0f; }

/* exp for x <= 0, with an error of a few units in the last place. */
inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    float whole = x * 1.44269504f + 12582912.0f;  // the sum is rounded to a whole number, in its lowest bits
    int32_t bits;
    __builtin_memcpy(&bits, &whole, 4);
    whole -= 12582912.0f;
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    int32_t scale = (bits - 0x4B400000 + 127) << 23;
    float power;
    __builtin_memcpy(&power, &scale, 4);
    return sum * power;
}

/* exp for -700 <= x <= 0, with an error of a few units in the last place of a double; NaN for NaN. */
inline double precise_exp_of(double x) {
    double whole = x * 1.4426950408889634 + 6755399441055744.0;  // as above
    int64_t bits;
    __builtin_memcpy(&bits, &whole, 8);
    whole -= 6755399441055744.0;
    const double rest = x - whole * 6.93147180369123816490e-01 - whole * 1.90821492927058770002e-10;
    double sum = 1.0 / 6227020800;  // the series of exp, which has these digits for |rest| < 0.35
    sum = sum * rest + 1.0 / 479001600;
    sum = sum * rest + 1.0 / 39916800;
    sum = sum * rest + 1.0 / 3628800;
    sum = sum * rest + 1.0 / 362880;
    sum = sum * rest + 1.0 / 40320;
    sum = sum * rest + 1.0 / 5040;
    sum = sum * rest + 1.0 / 720;
    sum = sum * rest + 1.0 / 120;
    sum = sum * rest + 1.0 / 24;
    sum = sum * rest + 1.0 / 6;
    sum = sum * rest + 0.5;
    sum = sum * rest + 1.0;
    sum = sum * rest + 1.0;
    const int64_t scale = (bits - 0x4338000000000000 + 1023) << 52;
    double power;
    __builtin_memcpy(&power, &scale, 8);
    return sum * power;
}

/* Calls body(first, end) for blocks of the row, and adds up what it returns. */
template <typename Body> double blocks(long n, Body body) {
    double sum = 0;
    for (long first = 0; first < n; first += BLOCK) sum += body(first, std::min(n, first + BLOCK));
    return sum;
}

/* The sum of value(i) for first <= i < end, in lanes. */
template <typename Value> double lanes(long first, long end, Value value) {
    float sums[LANES] = {};
    long i = first;
    for (; i + LANES <= end; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += value(i + lane);
    for (; i < end; i++) sums[0] += value(i);
    double sum = 0;
    for (float one : sums) sum += one;
    return sum;
}

/* The largest value(i) for i < n, in lanes; -infinity if there is none. */
template <typename Value> float most(long n, Value value) {
    float best[LANES];
    std::fill(best, best + LANES, -INFINITE);
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            const float one = value(i + lane);
            best[lane] = one > best[lane] ? one : best[lane];
        }
    for (; i < n; i++) best[0] = std::max(best[0], value(i));
    return *std::max_element(best, best + LANES);
}

/* Calls body(i) for each i < n that passes the test. The test runs in lanes, for it rarely holds. */
template <typename Test, typename Body> void where(long n, Test test, Body body) {
    for (long first = 0; first < n; first += LANES) {
        const long end = std::min<long>(n, first + LANES);
        int32_t any = 0;
        for (long i = first; i < end; i++) any |= test(i);
        for (long i = first; any && i < end; i++)
            if (test(i)) body(i);
    }
}

/* Divides by the temperature. False if a logit is NaN, or the largest is not finite. */
bool read(const float *logits, long n, float temperature, Row &row) {
    row.logits.resize(n);
    row.tokens.clear();
    float *x = row.logits.data(), best[LANES];
    int32_t wrong[LANES] = {};
    std::fill(best, best + LANES, -INFINITE);
    auto take = [&](long i, int lane) {
        float value = x[i] = logits[i] / temperature;
        best[lane] = value > best[lane] ? value : best[lane];
        wrong[lane] |= value != value;
    };
    long at = 0;
    for (; at + LANES <= n; at += LANES)
        for (int lane = 0; lane < LANES; lane++) take(at + lane, lane);
    for (; at < n; at++) take(at, 0);
    const float largest = row.largest = *std::max_element(best, best + LANES);
    if (*std::max_element(wrong, wrong + LANES) || *std::min_element(wrong, wrong + LANES)) return false;
    return std::isfinite(largest);
}

/* Takes exp, which is the costly part of a row. */
void weigh(Row &row) {
    row.weights.resize(row.size());
    const float *x = row.logits.data(), largest = row.largest;
    float *w = row.weights.data();
    row.total = blocks(row.size(), [=](long first, long end) {
        return lanes(first, end, [=](long i) { return w[i] = exp_of(x[i] - largest); });
    });
}

typedef std::vector<std::pair<float, int64_t>> Tokens;

/* The k largest of a row, the largest first; of equal ones the first. */
void likeliest(const float *x, int64_t n, int64_t k, Tokens &best) {
    best.clear();
    if (k < 1) return;
    for (long first = 0; first < n; first += LANES) {
        const long end = std::min<long>(n, first + LANES);
        const bool full = long(best.size()) == k;
        const float bar = full ? best.back().first : -INFINITE;
        int32_t any = !full;
        for (long i = first; full && i < end; i++) any |= x[i] > bar;
        for (long i = first; any && i < end; i++) {
            if (long(best.size()) == k) {
                if (!(x[i] > best.back().first)) continue;
                best.pop_back();
            }
            auto larger = [](float value, const auto &pair) { return value > pair.first; };
            best.insert(std::upper_bound(best.begin(), best.end(), x[i], larger), {x[i], i});
        }
    }
}

/* The tokens of a row with at least this value, as a row of their own. */
void select(const Row &row, float least, Row &few) {
    const float *x = row.logits.data();
    few.logits.clear(), few.tokens.clear();
    where(row.size(), [=](long i) { return x[i] >= least; },
          [&](long i) { few.logits.push_back(x[i]), few.tokens.push_back(uint32_t(i)); });
    few.largest = row.largest;
}

/* For each cut, the weight of all tokens with at least that value; without weights, their number. */
void masses(const float *values, const float *weights, long n, const float *cuts, double *found) {
    std::fill(found, found + CUTS, 0.0);
    blocks(n, [=](long first, long end) {
        for (int cut = 0; cut < CUTS; cut++) {
            const float low = cuts[cut];
            found[cut] += weights
                ? lanes(first, end, [=](long i) { return values[i] >= low ? weights[i] : 0.0f; })
                : lanes(first, end, [=](long i) { return values[i] >= low ? 1.0f : 0.0f; });
        }
        return 0.0;
    });
}

/* Keeps the tokens with the largest values until those before one hold a mass between `from` and `to`. Tokens with equal
 * values stay or go together. False if too many tokens are close to the threshold. */
bool threshold(const float *v, const float *w, long n, std::pair<double, double> mass, Threshold &found) {
    float low = -INFINITE, high = INFINITE, cuts[CUTS];  // it lies in [low, high)
    double held[CUTS], before = 0;                       // the mass from `high` on
    const float largest = most(n, [=](long i) { return v[i]; });
    for (int pass = 0; pass < PASSES; pass++) {
        for (int i = 0; i < CUTS; i++)
            cuts[i] = pass ? high + (low - high) * float(i + 1) / (CUTS + 1) : largest - COARSE[i];
        masses(v, w, n, cuts, held);
        for (int i = CUTS - 1; i >= 0; i--)
            if (held[i] > mass.second && cuts[i] > low) low = cuts[i];
        for (int i = 0; i < CUTS; i++)
            if (held[i] < mass.first && cuts[i] < high && cuts[i] > low) high = cuts[i], before = held[i];
        if (high == INFINITE) high = std::nextafter(largest, INFINITE);
        if (low == -INFINITE) break;
    }
    std::vector<std::pair<float, float>> near;
    where(n, [=](long i) { return (v[i] >= low) & (v[i] < high) & (v[i] > -INFINITE); },
          [&](long i) { near.emplace_back(v[i], w ? w[i] : 1.0f); });
    if (near.size() > MOST) return false;
    std::sort(near.begin(), near.end(), std::greater<>());
    found = {high, high};
    for (size_t i = 0, end; i < near.size(); i = end) {
        double group = 0;
        for (end = i; end < near.size() && near[end].first == near[i].first; end++) group += near[end].second;
        if (before < mass.first && found.sure == found.least) found.sure = near[i].first;
        if (before < mass.second) found.least = near[i].first;
        before += group;
    }
    return true;
}

/* The distance of each kept token's surprise from the entropy becomes a value with a threshold of its own. False where
 * tokens that may not be kept would change the entropy. */
bool keep_typical(Row &row, double mass, const Threshold &kept, Threshold &found) {
    const long n = row.size();
    const float *x = row.logits.data(), *w = row.weights.data(), low = kept.sure, largest = row.largest;
    bool doubtful = false;
    const float doubted = kept.least;
    if (low > doubted) where(n, [=](long i) { return (x[i] < low) & (x[i] >= doubted); }, [&](long) { doubtful = true; });
    if (doubtful) return false;
    double total = blocks(n, [=](long first, long end) {
        return lanes(first, end, [=](long i) { return x[i] >= low ? w[i] : 0.0f; });
    });
    double entropy = blocks(n, [=](long first, long end) {
        return lanes(first, end, [=](long i) { return x[i] >= low && x[i] > -INFINITE ? w[i] * (largest - x[i]) : 0; });
    });
    const float center = float(entropy / total);  // the entropy and each surprise have log(total) in common
    row.typical.resize(n);
    float *values = row.typical.data();
    for (long i = 0; i < n; i++) values[i] = x[i] >= low ? -std::fabs(largest - x[i] - center) : -INFINITE;
    std::pair<double, double> held((mass - MASS_ERROR) * total, (mass + MASS_ERROR) * total);
    if (!threshold(values, w, n, held, found)) return false;
    const float last = found.least;  // and the values next to it
    const float above = -most(n, [=](long i) { return values[i] > last ? -values[i] : -INFINITE; });
    const float below = most(n, [=](long i) { return values[i] < last ? values[i] : -INFINITE; });
    const float error = SURPRISE_ERROR * (1 - found.least);
    const bool apart = above - found.least > 2 * error && found.least - below > 2 * error;
    const bool certain = found.sure == found.least && apart;
    found.least -= error, found.sure += certain ? -error : error;
    return true;
}

/* The token with the largest score among those that are kept. A token with the uniform number u can only have a score
 * of `floor` if 1 - u <= exp(logit - floor). */
template <typename Token>
int choose(const Row &row, const Settings &s, const Threshold &kept, const Threshold &typical, Token of, int64_t &token) {
    const long n = row.size();
    const float *x = row.logits.data(), *w = row.weights.data(), *values = row.typical.data(), least = kept.least;
    const bool all_typical = typical.least == -INFINITE;
    auto possible = [&](long i) { return x[i] >= least && (all_typical || values[i] >= typical.least); };
    long first_kept = n;
    for (long at = 0; at < n && first_kept == n; at += BLOCK)
        where(std::min(BLOCK, n - at), [=, &row](long i) { return x[at + i] == row.largest; },
              [&](long i) { first_kept = std::min(first_kept, at + i); });
    for (long i = 0; i < n && !possible(first_kept); i++) first_kept = i;
    double best = -INFINITE, second = best, floor = score(x[first_kept], word(of(first_kept), s));
    long winner = -1;
    uint8_t able[BLOCK];
    for (long first = 0; first < n; first += BLOCK) {
        const int count = int(std::min(BLOCK, n - first));
        const float bar = float(std::exp(floor - row.largest) / 4294967296.0 * 0.999), *logit = x + first, *weight = w + first;
        for (int i = 0; i < count; i++)
            able[i] = (distance(word(of(first + i), s)) * bar <= weight[i]) & (logit[i] >= least);
        for (int i = 0; i < count; i++) {
            if (!able[i] || !possible(first + i)) continue;
            double value = score(x[first + i], word(of(first + i), s));
            if (value > best)
                second = best, best = value, winner = first + i, floor = std::max(floor, best);
            else if (value > second)
                second = value;
        }
    }
    token = winner < 0 ? -1 : int64_t(of(winner));
    if (winner < 0 || best - second < TIE * (1 + std::fabs(best))) return UNSURE;
    return x[winner] < kept.sure || (!all_typical && values[winner] < typical.sure) ? UNSURE : SURE;
}

}  // namespace

extern "C" int outpace_choose(const float *logits, int64_t n, const Settings *settings, int64_t *token) {
    static thread_local Row whole, few;
    static thread_local Tokens best;
    const Settings &s = *settings;
    if (!read(logits, n, s.temperature, whole)) return NOT_FINITE;
    Threshold kept, found, typical;
    const bool listed = s.top_k && s.top_k < n && s.top_k <= MOST_K;
    if (listed) {
        likeliest(whole.logits.data(), n, s.top_k, best);
        select(whole, kept.least = kept.sure = best.back().first, few);
    }
    Row &row = listed ? few : whole;
    weigh(row);
    const float *x = row.logits.data(), *w = row.weights.data();
    const long count = row.size();
    double total = row.total;
    if (s.top_k && s.top_k < n && !listed) {
        const double before = double(s.top_k) - 0.5;
        if (!threshold(x, nullptr, count, {before, before}, kept)) return UNSURE;
        const float low = kept.least;
        total = blocks(count, [=](long first, long end) {
            return lanes(first, end, [=](long i) { return x[i] >= low ? w[i] : 0.0f; });
        });
    }
    if (s.top_p < 1) {
        std::pair<double, double> held((s.top_p - MASS_ERROR) * total, (s.top_p + MASS_ERROR) * total);
        if (!threshold(x, w, count, held, found)) return UNSURE;
        kept.raise(found);
    }
    if (s.min_p > 0) {
        const double cut = row.largest + std::log(s.min_p), error = SHARE_ERROR * (1 + std::fabs(cut));
        kept.raise({float(cut - error), float(cut + error)});
    }
    if (s.typical_p < 1 && !keep_typical(row, s.typical_p, kept, typical)) return UNSURE;
    const uint32_t *tokens = row.tokens.data();
    if (listed) return choose(row, s, kept, typical, [=](long i) { return tokens[i]; }, *token);
    return choose(row, s, kept, typical, [](long i) { return uint32_t(i); }, *token);
}

extern "C" void outpace_top_k(const float *x, int64_t n, int64_t k, int64_t *found) {
    static thread_local Tokens best;
    likeliest(x, n, k, best);
    for (int64_t i = 0; i < k; i++) found[i] = i < long(best.size()) ? best[i].second : -1;
}

/* exp(x - largest) in float64, and its exponent; tokens that are excluded weigh nothing. */
struct Term {
    double below, weight;
    inline Term(float x, float largest) {
        const double given = double(x) - double(largest);
        below = given < -700.0 ? -700.0 : given;
        const double exact = precise_exp_of(below);
        weight = given < -700.0 ? 0.0 : exact;
    }
};

/* What log-probabilities need of a row: its largest value, the logarithm of the sum of exp(x - largest), and the
 * entropy. All sums are float64. Not finite where the row is not. */
extern "C" void outpace_log_sum(const float *x, int64_t n, double *found) {
    const float largest = most(n, [=](long i) { return x[i]; });
    double weight[LANES] = {}, spread[LANES] = {};  // of exp(x - largest), and of that times (x - largest)
    long at = 0;
    for (; at + LANES <= n; at += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            const Term term(x[at + lane], largest);
            weight[lane] += term.weight, spread[lane] += term.weight * term.below;
        }
    for (; at < n; at++) {
        const Term term(x[at], largest);
        weight[0] += term.weight, spread[0] += term.weight * term.below;
    }
    double total = 0, mean = 0;
    for (int lane = 0; lane < LANES; lane++) total += weight[lane], mean += spread[lane];
    found[0] = largest, found[1] = std::log(total), found[2] = std::log(total) - mean / total;
}
