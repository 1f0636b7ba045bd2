// fx_fuser::evaluate on CUDA: an op of which y alone is wanted, all whose arguments but its tensors
// are a text. fx_fuser/ops/evaluate.py says why, and what the text is.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/conv.h"
#include "host/folded.h"
#include "host/linear.h"
#include "host/made.h"

namespace fx_fuser {
namespace {

// The words of such a text, one after the other.
class CallText {
 public:
  explicit CallText(std::string_view text) : whole_(text), left_(text) {}

  // Up to the next space.
  std::string_view word() {
    const size_t end = std::min(left_.find(' '), left_.size());
    const std::string_view found = left_.substr(0, end);
    left_.remove_prefix(std::min(end + 1, left_.size()));
    return found;
  }

  // What follows this letter.
  std::string_view word(char kind) {
    require(!left_.empty() && left_[0] == kind);
    left_.remove_prefix(1);
    return word();
  }

  bool next_is(char kind) const { return !left_.empty() && left_[0] == kind; }

  template <class Number>
  Number number(char kind, int base = 10) {
    const std::string_view digits = word(kind);
    return number_of<Number>(digits, base);
  }

  std::string string() {
    require(next_is('s'));
    left_.remove_prefix(1);
    const size_t colon = left_.find(':');
    require(colon != std::string_view::npos);
    const auto length = number_of<size_t>(left_.substr(0, colon), 10);
    left_.remove_prefix(colon + 1);
    require(length <= left_.size());
    std::string found(left_.substr(0, length));
    left_.remove_prefix(std::min(length + 1, left_.size()));
    return found;
  }

  size_t tensor() {
    require(word('t').empty());
    return tensors_++;
  }

  // How many tensors were read.
  size_t tensors() const { return tensors_; }

  void require(bool is_right) const {
    STD_TORCH_CHECK(is_right, "fx_fuser: evaluate cannot read what it is to call: ", whole_,
                    ", from byte ", whole_.size() - left_.size());
  }

  bool is_read() const { return left_.empty(); }

 private:
  template <class Number>
  Number number_of(std::string_view digits, int base) const {
    Number value{};
    const char* end = digits.data() + digits.size();
    const auto [stop, error] = std::from_chars(digits.data(), end, value, base);
    require(error == std::errc() && stop == end);
    return value;
  }

  std::string_view whole_;
  std::string_view left_;
  size_t tensors_ = 0;
};

// An argument of an op, read from the text: of(tensors) is its value.
template <class T>
class CallArgument {
 public:
  explicit CallArgument(CallText& text) : value_(read(text)) {}
  const T& of(const std::vector<Tensor>& /*tensors*/) const { return value_; }

 private:
  static T read(CallText& text) {
    if constexpr (std::is_same_v<T, bool>) {
      return text.number<int>('b') != 0;
    } else if constexpr (std::is_same_v<T, int64_t>) {
      return text.number<int64_t>('i');
    } else if constexpr (std::is_same_v<T, double>) {
      const auto bits = text.number<uint64_t>('f', 16);
      double value = 0;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    } else if constexpr (std::is_same_v<T, std::string>) {
      return text.string();
    } else if constexpr (std::is_same_v<T, ScalarType>) {
      return scalar_type_of(std::string(text.word('d')));
    } else {
      T found;
      for (auto left = text.number<size_t>('#'); left > 0; --left) {
        found.push_back(CallArgument<typename T::value_type>(text).of({}));
      }
      return found;
    }
  }

  T value_;
};

template <>
class CallArgument<Tensor> {
 public:
  explicit CallArgument(CallText& text) : place_(text.tensor()) {}
  const Tensor& of(const std::vector<Tensor>& tensors) const { return tensors[place_]; }

 private:
  size_t place_;
};

template <>
class CallArgument<std::optional<Tensor>> {
 public:
  explicit CallArgument(CallText& text) {
    if (text.next_is('-')) {
      text.require(text.word('-').empty());
    } else {
      place_ = text.tensor();
    }
  }
  std::optional<Tensor> of(const std::vector<Tensor>& tensors) const {
    return place_ ? std::optional(tensors[*place_]) : std::nullopt;
  }

 private:
  std::optional<size_t> place_;
};

template <>
class CallArgument<std::vector<Tensor>> {
 public:
  explicit CallArgument(CallText& text) : first_(text.tensors()), count_(text.number<size_t>('#')) {
    for (size_t i = 0; i < count_; ++i) text.tensor();
  }
  std::vector<Tensor> of(const std::vector<Tensor>& tensors) const {
    const auto first = tensors.begin() + static_cast<std::ptrdiff_t>(first_);
    return {first, first + static_cast<std::ptrdiff_t>(count_)};
  }

 private:
  size_t first_;
  size_t count_;
};

Tensor y_of(Made made) { return std::move(made.y); }
Tensor y_of(Tensor y) { return y; }

struct Evaluation {
  size_t tensors = 0;
  std::function<Tensor(const std::vector<Tensor>&)> run;
};

template <class Result, class... Arguments>
Evaluation evaluation_of(Result (*op)(Arguments...), CallText& text) {
  // In the order of the text: so braces, not parentheses.
  std::tuple<CallArgument<std::decay_t<Arguments>>...> held{
      CallArgument<std::decay_t<Arguments>>(text)...};
  text.require(text.is_read());
  return {text.tensors(), [op, held = std::move(held)](const std::vector<Tensor>& tensors) {
            return std::apply(
                [&](const auto&... argument) { return y_of(op(argument.of(tensors)...)); }, held);
          }};
}

Evaluation evaluation_of(const std::string& call) {
  CallText text(call);
  const std::string_view name = text.word();
  if (name == "linear_kernel") return evaluation_of(make_linear, text);
  if (name == "matmul_kernel") return evaluation_of(make_matmul, text);
  if (name == "bmm_kernel") return evaluation_of(make_bmm, text);
  if (name == "conv2d_kernel") return evaluation_of(make_conv2d, text);
  if (name == "conv2d_batchnorm_kernel") return evaluation_of(make_conv2d_batchnorm, text);
  if (name == "conv2d_folded") return evaluation_of(conv2d_folded, text);
  STD_TORCH_CHECK(false, "fx_fuser: evaluate calls no op ", name);
}

// Each text is read once. A reference stays: nothing is taken out.
const Evaluation& known_evaluation(const std::string& call) {
  static std::mutex mutex;
  static std::unordered_map<std::string, Evaluation> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(call);
  return found != known.end() ? found->second
                              : known.emplace(call, evaluation_of(call)).first->second;
}

Tensor evaluate(const std::vector<Tensor>& tensors, const std::string& call) {
  const Evaluation& evaluation = known_evaluation(call);
  STD_TORCH_CHECK(tensors.size() == evaluation.tensors, "fx_fuser: evaluate has ", tensors.size(),
                  " tensors, not ", evaluation.tensors);
  return evaluation.run(tensors);
}

}  // namespace
}  // namespace fx_fuser
