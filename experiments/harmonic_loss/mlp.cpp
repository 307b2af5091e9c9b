// Epochs of AdamW on one small tied MLP per seed, with the gradients written out: what
// `bench._trainer` does with PyTorch, without its overhead. Widths are padded with zeros to
// multiples of 16. The padding stays zero, because its gradient is zero.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using Long = std::int64_t;
constexpr int D = 16, W = 112, N = 32, MAX_T = 3, MAX_V = 144;
constexpr float BETA1 = 0.9f, BETA2 = 0.999f, EPS = 1e-4f;
typedef float Vector __attribute__((vector_size(32)));
enum Head { LINEAR, DIST, L2, L2_SQUARED, DOT_HARMONIC };

// c [n, m] = a [n, k] @ b [k, m]; `Transposed`: a is stored as [k, n]. n % 4 = m % 16 = 0.
template <bool Transposed>
void multiply(const float* a, const float* b, float* c, int n, int k, int m) {
  for (int i = 0; i < n; i += 4)
    for (int j = 0; j < m; j += 16) {
      Vector sums[4][2] = {};
      for (int p = 0; p < k; ++p) {
        Vector row[2];
        std::memcpy(row, b + p * m + j, sizeof row);
        for (int r = 0; r < 4; ++r) {
          const float factor = Transposed ? a[p * n + i + r] : a[(i + r) * k + p];
          sums[r][0] += factor * row[0];
          sums[r][1] += factor * row[1];
        }
      }
      for (int r = 0; r < 4; ++r) std::memcpy(c + (i + r) * m + j, sums[r], sizeof sums[r]);
    }
}

void transpose(const float* a, float* b, int n, int m) {
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < m; ++j) b[j * n + i] = a[i * m + j];
}

void sum_rows(const float* a, float* sums, int n, int m) {
  std::memset(sums, 0, m * sizeof *sums);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < m; ++j) sums[j] += a[i * m + j];
}

struct Sizes {
  int T, V, padded_V;  // tokens of an example, rows of the embedding
  // Where the parameters of a seed start: embedding [V, D], weights [T D, W] and [W, D], biases.
  int first() const { return padded_V * D; }
  int first_bias() const { return first() + T * D * W; }
  int last() const { return first_bias() + W; }
  int last_bias() const { return last() + W * D; }
  int bias() const { return last_bias() + D; }
  int total() const { return bias() + padded_V; }
};

// From dots to the gradient of the mean loss by dots, or by squared distances; in place.
void head_gradient(float* dots, const float* hidden, const float* prototypes, const float* bias,
                   const Long* labels, int rows, Head head, float h_exp, Sizes sizes) {
  const bool distance = head == DIST || head == L2 || head == L2_SQUARED;
  float norms[MAX_V];
  for (int v = 0; v < sizes.V; ++v) {
    norms[v] = 0;
    for (int d = 0; d < D; ++d) norms[v] += prototypes[v * D + d] * prototypes[v * D + d];
  }
  for (int i = 0; i < N; ++i) {
    float *row = dots + i * sizes.padded_V, logits[MAX_V], slopes[MAX_V], norm = 0, most = -INFINITY;
    for (int d = 0; d < D; ++d) norm += hidden[i * D + d] * hidden[i * D + d];
    for (int v = 0; v < sizes.V; ++v) {
      const float squared = distance ? norm + norms[v] - 2 * row[v] : row[v] * row[v];
      const float inside = std::fmax(squared, 0.f) + EPS;
      switch (head) {
        case LINEAR: logits[v] = row[v] + bias[v], slopes[v] = 1; break;
        case DIST: logits[v] = h_exp * std::log(inside), slopes[v] = h_exp / inside; break;
        case L2: logits[v] = -std::sqrt(inside), slopes[v] = -0.5f / std::sqrt(inside); break;
        case L2_SQUARED: logits[v] = EPS - inside, slopes[v] = -1; break;
        case DOT_HARMONIC:
          logits[v] = h_exp * std::log(inside), slopes[v] = 2 * h_exp * row[v] / inside;
      }
      if (squared < 0) slopes[v] = 0;
    }
    for (int v = 0; v < sizes.V; ++v) most = std::fmax(most, logits[v]);
    float total = 0;
    for (int v = 0; v < sizes.V; ++v) logits[v] = std::exp(logits[v] - most), total += logits[v];
    const float share = i < rows ? 1.f / rows : 0.f;
    for (int v = 0; v < sizes.V; ++v) {
      const float target = i < rows && labels[i] == v;
      row[v] = share * (logits[v] / total - target) * slopes[v];
    }
    for (int v = sizes.V; v < sizes.padded_V; ++v) row[v] = 0;
  }
}

// The gradient of the mean loss of `rows` examples, and of the penalty, by all parameters.
void gradient(const float* at, float* by, const Long* tokens, const Long* labels, int rows,
              Head head, float h_exp, float penalty, Sizes sizes) {
  const int T = sizes.T, V = sizes.padded_V;
  static float e[N * MAX_T * D], a[N * W], h[N * W], slopes[N * W], z[N * D], dots[N * MAX_V];
  static float turned[MAX_T * D * W], by_z[N * D], by_h[N * W], by_e[N * MAX_T * D], sums[MAX_V];
  std::memset(e, 0, sizeof e);
  for (int i = 0; i < rows; ++i)
    for (int t = 0; t < T; ++t)
      std::memcpy(e + (i * T + t) * D, at + tokens[i * T + t] * D, D * sizeof *e);
  multiply<false>(e, at + sizes.first(), a, N, T * D, W);
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < W; ++j) {
      const float x = a[i * W + j] + at[sizes.first_bias() + j];
      // -ffast-math makes NaN of the reciprocal of infinity.
      const float gate = 1 / (1 + std::exp(std::fmin(-x, 80.f)));
      h[i * W + j] = x * gate;
      slopes[i * W + j] = gate * (1 + x * (1 - gate));
    }
  multiply<false>(h, at + sizes.last(), z, N, W, D);
  for (int i = 0; i < N; ++i)
    for (int d = 0; d < D; ++d) z[i * D + d] += at[sizes.last_bias() + d];
  transpose(at, turned, V, D);
  multiply<false>(z, turned, dots, N, D, V);
  head_gradient(dots, z, at, at + sizes.bias(), labels, rows, head, h_exp, sizes);

  std::memset(by, 0, sizes.total() * sizeof *by);
  multiply<false>(dots, at, by_z, N, V, D);
  multiply<true>(dots, z, by, V, N, D);
  sum_rows(dots, sums, N, V);
  if (head == LINEAR) {
    std::memcpy(by + sizes.bias(), sums, V * sizeof *by);
  } else if (head != DOT_HARMONIC) {  // the squared distance is |z|^2 + |w|^2 - 2 dots
    for (int i = 0; i < N; ++i) {
      float sum = 0;
      for (int v = 0; v < V; ++v) sum += dots[i * V + v];
      for (int d = 0; d < D; ++d) by_z[i * D + d] = 2 * (sum * z[i * D + d] - by_z[i * D + d]);
    }
    for (int v = 0; v < V; ++v)
      for (int d = 0; d < D; ++d) by[v * D + d] = 2 * (sums[v] * at[v * D + d] - by[v * D + d]);
  }
  multiply<true>(h, by_z, by + sizes.last(), W, N, D);
  sum_rows(by_z, by + sizes.last_bias(), N, D);
  transpose(at + sizes.last(), turned, W, D);
  multiply<false>(by_z, turned, by_h, N, D, W);
  for (int i = 0; i < N * W; ++i) by_h[i] *= slopes[i];
  multiply<true>(e, by_h, by + sizes.first(), T * D, N, W);
  sum_rows(by_h, by + sizes.first_bias(), N, W);
  transpose(at + sizes.first(), turned, T * D, W);
  multiply<false>(by_h, turned, by_e, N, W, T * D);
  for (int i = 0; i < rows * T; ++i)
    for (int d = 0; d < D; ++d) by[tokens[i] * D + d] += by_e[i * D + d];
  for (int d = 0; d < D; ++d) {
    float sum = 0;
    for (int v = 0; v < V; ++v) sum += at[v * D + d] * at[v * D + d];
    const float scale = penalty / (D * sizes.V * std::sqrt(sum / sizes.V));
    for (int v = 0; v < V; ++v) by[v * D + d] += scale * at[v * D + d];
  }
}

}  // namespace

// Every parameter tensor is [S, total]; inputs are [S, examples, T], labels [S, examples], and
// orders [S, epochs, training]: rows of the examples.
extern "C" void train(float* parameters, float* means, float* squares, const Long* inputs,
                      const Long* labels, const Long* orders, int num_seeds, int num_examples,
                      int num_epochs, int num_training, int steps_before, int T, int V,
                      int padded_V, int head, float h_exp, float penalty, float learning_rate,
                      float weight_decay) {
  const Sizes sizes{T, V, padded_V};
  static float by[MAX_V * D + MAX_T * D * W + W + W * D + D + MAX_V];
  for (int seed = 0; seed < num_seeds; ++seed) {
    float *at = parameters + (Long)seed * sizes.total(), *mean = means + (Long)seed * sizes.total();
    float* square = squares + (Long)seed * sizes.total();
    int step = steps_before;
    for (int epoch = 0; epoch < num_epochs; ++epoch)
      for (int start = 0; start < num_training; start += N) {
        Long tokens[N * MAX_T], targets[N];
        const int rows = num_training - start < N ? num_training - start : N;
        for (int i = 0; i < rows; ++i) {
          const Long row = (Long)seed * num_examples +
                           orders[((Long)seed * num_epochs + epoch) * num_training + start + i];
          for (int t = 0; t < T; ++t) tokens[i * T + t] = inputs[row * T + t];
          targets[i] = labels[row];
        }
        gradient(at, by, tokens, targets, rows, (Head)head, h_exp, penalty, sizes);
        ++step;
        const float rate = learning_rate / (1 - std::pow((double)BETA1, step));
        const float correction = 1 / std::sqrt(1 - std::pow((double)BETA2, step));
        for (int i = 0; i < sizes.total(); ++i) {
          mean[i] += (1 - BETA1) * (by[i] - mean[i]);
          square[i] = BETA2 * square[i] + (1 - BETA2) * by[i] * by[i];
          at[i] = at[i] * (1 - learning_rate * weight_decay) -
                  rate * mean[i] / (std::sqrt(square[i]) * correction + 1e-8f);
        }
      }
  }
}
