// The ledger of evictions of the eager runtime: planner.solvers.online.ledger and planner.solvers.online.heuristics define what
// each method and heuristic does; both choose the same storages, and a test drives them side by side.
//
// Costs of neighbourhoods that are classes of a union-find are added up when they are asked for, because a storage has few
// neighbours. Those that are regions are kept until they change. Each choice looks at all candidates: a score takes nanoseconds.

#include "op_records.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using Ids = std::vector<int64_t>;

enum class Rule { kClasses, kFull, kUpwards, kLocal, kRecent, kLargest, kRandom, kInterpreter };

constexpr double kBytesPerSecond = 1e8;
constexpr double kMiB = 1 << 20;
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int64_t kNone = -1;
constexpr double kRounded = 1 + 1e-9; // costs of classes are sums and differences

Rule read_rule(const std::string& name) {
  static const std::unordered_map<std::string, Rule> rules = {
      {"dtr", Rule::kClasses}, {"dtr-full", Rule::kFull},   {"msps", Rule::kUpwards},      {"dtr-local", Rule::kLocal},
      {"lru", Rule::kRecent},  {"largest", Rule::kLargest}, {"dtr-random", Rule::kRandom}, {"megengine", Rule::kInterpreter}};
  const auto found = rules.find(name);
  if (found == rules.end()) {
    throw std::invalid_argument("there is no heuristic " + name);
  }
  return found->second;
}

double divide(double above, double below) {
  return below > 0 ? above / below : kNever;
}

double hash_to_uniform(std::array<int64_t, 3> numbers) {
  uint64_t mixed = 0;
  for (auto number : numbers) {
    mixed = (mixed ^ static_cast<uint64_t>(number)) + 0x9E3779B97F4A7C15;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    mixed ^= mixed >> 31;
  }
  return std::ldexp(static_cast<double>(mixed >> 11), -53);
}

// Removes one value, and keeps the order of the others.
void remove_from(Ids& values, int64_t value) {
  const auto found = std::find(values.begin(), values.end(), value);
  if (found != values.end()) {
    values.erase(found);
  }
}

struct Cached {
  double cost_s = 0;
  bool outdated = true;
};

struct Storage {
  double size_bytes = 0, own_s = 0, touched_s = 0;
  int64_t origin = 0, since = 0, again = 0, pins = 0;
  int64_t label = kNone; // of its class, if it is evicted
  int64_t place = kNone; // among the candidates
  int64_t seen = 0; // the last search that has found it
  bool gone = false, live = false;
  Ids parents{}, children{}, writers{}; // in the order of the ops
  Cached upwards{}, downwards{};
  double next = 0; // when it fires next
  int64_t drawn = 0;
};

struct Op {
  Ids inputs, outputs;
};

// A class of evicted storages that are neighbours.
struct Class {
  int64_t merged_into;
  double cost_s;
  int64_t members = 1; // that are evicted
  int64_t joined = 1;
};

class Ledger final : public EvictionLedger {
 public:
  Ledger(const std::string& name, py::object heuristic)
      : heuristic_(std::move(heuristic)), rule_(read_rule(name)), least_bytes_(heuristic_.attr("least_bytes").cast<int64_t>()),
        counts_bytes_(heuristic_.attr("counts_bytes").cast<bool>()) {}

  double estimate_s(double seconds, int64_t moved_bytes) const override {
    return counts_bytes_ ? static_cast<double>(moved_bytes) / kBytesPerSecond : seconds;
  }

  py::object heuristic() const {
    return heuristic_;
  }

  int64_t length() const {
    return static_cast<int64_t>(storages_.size() - unused_.size());
  }

  int64_t add_storage(int64_t size_bytes, std::optional<std::pair<int64_t, int64_t>> origin) override {
    int64_t id = static_cast<int64_t>(storages_.size());
    if (unused_.empty()) {
      storages_.emplace_back();
    } else {
      id = unused_.back();
      unused_.pop_back();
      at(id) = Storage();
    }
    auto& storage = at(id);
    const auto [op, place] = origin.value_or(std::pair<int64_t, int64_t>(numbers_, 0));
    storage.origin = op << 16 | place;
    storage.size_bytes = static_cast<double>(size_bytes);
    storage.pins = size_bytes <= least_bytes_;
    storage.next = now_;
    enter(id);
    return id;
  }

  int64_t add_op(const Ids& inputs, const Ids& outputs, double seconds) override {
    const auto number = op_numbers_++;
    if (!outputs.empty()) {
      ops_.emplace(number, Op{inputs, outputs});
    }
    for (auto id : outputs) {
      auto& out = at(id);
      out.own_s += seconds;
      if (out.gone) {
        note_dearer(id, seconds);
      }
      out.writers.push_back(number);
      for (auto input : inputs) {
        if (input != id && std::find(out.parents.begin(), out.parents.end(), input) == out.parents.end()) {
          out.parents.push_back(input);
          at(input).children.push_back(id);
          if (at(input).gone || out.gone) {
            note_related(input, id);
          }
        }
      }
    }
    number_all(inputs);
    return number;
  }

  void note_recomputed(int64_t op) override {
    const auto& record = ops_.at(op);
    for (auto id : record.outputs) {
      ++at(id).again;
    }
    number_all(record.inputs);
  }

  void touch(const Ids& ids, double now_s) override {
    for (auto id : ids) {
      at(id).touched_s = now_s;
    }
  }

  void note_evicted(int64_t id) override {
    auto& storage = at(id);
    storage.live = false;
    update_candidate(id);
    storage.gone = true;
    if (has_classes()) {
      Ids labels{static_cast<int64_t>(classes_.size())};
      each_neighbour(id, [&](const Storage& other) { labels.push_back(find_class(other.label)); });
      storage.label = labels.front();
      classes_.push_back({storage.label, storage.own_s});
      merge(labels);
    } else {
      mark_changed(id);
    }
  }

  void note_computed(int64_t id) override {
    enter(id);
    restore(id);
  }

  void pin(int64_t id) override {
    ++at(id).pins;
    update_candidate(id);
  }

  void unpin(int64_t id) override {
    --at(id).pins;
    update_candidate(id);
  }

  void drop(int64_t id) override {
    restore(id);
    auto& storage = at(id);
    storage.live = false;
    update_candidate(id);
    for (auto child : storage.children) {
      pin(child);
      remove_from(at(child).parents, id);
    }
    for (auto parent : storage.parents) {
      remove_from(at(parent).children, id);
    }
    for (auto op : storage.writers) {
      const auto found = ops_.find(op);
      remove_from(found->second.outputs, id);
      if (found->second.outputs.empty()) {
        ops_.erase(found);
      }
    }
    storage = Storage();
    unused_.push_back(id);
  }

  // Of equal scores it is the storage that became evictable last, but for scores of 0 the first.
  std::optional<int64_t> choose_victim(double now_s) override {
    std::optional<int64_t> chosen;
    double least = kNever;
    for (auto id : candidates_) {
      if (chosen && rule_ != Rule::kInterpreter && (is_region() || has_classes()) && score_with(id, 0, now_s) > least * kRounded) {
        continue; // its neighbourhood, which takes longer, only adds to that
      }
      const double score = score_of(id, now_s);
      const bool is_tied = chosen && score == least;
      const bool is_better = is_tied ? (least == 0 ? at(id).since < at(*chosen).since : at(id).since > at(*chosen).since) : score < least;
      if (!chosen || is_better) {
        chosen = id;
        least = score;
      }
    }
    if (chosen && rule_ == Rule::kRandom) {
      now_ = at(*chosen).next;
    }
    return chosen;
  }

 private:
  Storage& at(int64_t id) {
    return storages_[static_cast<size_t>(id)];
  }

  void enter(int64_t id) {
    at(id).since = numbers_++;
    at(id).live = true;
    update_candidate(id);
  }

  void restore(int64_t id) {
    auto& storage = at(id);
    if (!storage.gone) {
      return;
    }
    storage.gone = false;
    if (has_classes()) {
      auto& left = class_of(std::exchange(storage.label, kNone));
      left.cost_s -= storage.own_s;
      --left.members;
    } else {
      mark_changed(id);
    }
  }

  void number_all(const Ids& ids) {
    for (auto id : ids) {
      at(id).since = numbers_++;
    }
  }

  // Candidates are the storages in memory that are not pinned.
  void update_candidate(int64_t id) {
    auto& storage = at(id);
    const bool may_be_evicted = storage.live && storage.pins == 0;
    if (may_be_evicted && storage.place == kNone) {
      storage.place = static_cast<int64_t>(candidates_.size());
      candidates_.push_back(id);
    } else if (!may_be_evicted && storage.place != kNone) {
      const auto place = std::exchange(storage.place, kNone);
      const auto last = candidates_.back();
      candidates_.pop_back();
      if (last != id) {
        candidates_[static_cast<size_t>(place)] = last;
        at(last).place = place;
      }
    }
  }

  // Scores.

  double score_of(int64_t id, double now_s) {
    switch (rule_) {
      case Rule::kRecent:
        return at(id).touched_s;
      case Rule::kLargest:
        return divide(1, at(id).size_bytes);
      case Rule::kRandom:
        return next_of(id);
      case Rule::kClasses:
        return score_with(id, cost_around_s(id), now_s);
      case Rule::kLocal:
        return score_with(id, 0, now_s);
      case Rule::kInterpreter: {
        const auto& storage = at(id);
        const double cost = cost_around_s(id) * kBytesPerSecond + 1e-3;
        return divide(cost * std::pow(1.0001, static_cast<double>(storage.again)),
                      storage.size_bytes / kMiB * (now_s - storage.touched_s + 1e-3));
      }
      default: {
        double total_s = 0 + cost_behind_s(id, at(id).upwards, &Storage::parents);
        if (rule_ == Rule::kFull) {
          total_s += cost_behind_s(id, at(id).downwards, &Storage::children);
        }
        return score_with(id, total_s, now_s);
      }
    }
  }

  double score_with(int64_t id, double neighbourhood_s, double now_s) {
    const auto& storage = at(id);
    const double below = rule_ == Rule::kUpwards ? storage.size_bytes : storage.size_bytes * (now_s - storage.touched_s);
    return divide(storage.own_s + neighbourhood_s, below);
  }

  double next_of(int64_t id) {
    auto& storage = at(id);
    while (storage.next <= now_) {
      storage.next -= std::log1p(-hash_to_uniform({0, storage.origin, storage.drawn}));
      ++storage.drawn;
    }
    return storage.next;
  }

  // Neighbourhoods that are classes.

  bool has_classes() const {
    return rule_ == Rule::kClasses || rule_ == Rule::kInterpreter;
  }

  // Visits the evicted neighbours of a storage.
  template <typename Visit>
  void each_neighbour(int64_t id, Visit visit) {
    const auto visit_all = [&](const Ids& ids) {
      for (auto other : ids) {
        if (other != id && at(other).label != kNone) {
          visit(at(other));
        }
      }
    };
    visit_all(at(id).parents);
    if (rule_ == Rule::kClasses) {
      return visit_all(at(id).children);
    }
    for (auto op : at(id).writers) {
      visit_all(ops_.at(op).outputs);
    }
  }

  double cost_around_s(int64_t id) {
    double cost_s = 0;
    around_.clear();
    each_neighbour(id, [&](const Storage& other) {
      const auto label = find_class(other.label);
      if (rule_ == Rule::kInterpreter) {
        cost_s += std::max(classes_[static_cast<size_t>(label)].cost_s, other.own_s);
      } else {
        around_.push_back(label);
      }
    });
    sort_and_deduplicate(around_);
    for (auto label : around_) {
      cost_s += classes_[static_cast<size_t>(label)].cost_s;
    }
    return cost_s;
  }

  static void sort_and_deduplicate(Ids& ids) {
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  }

  int64_t find_class(int64_t label) {
    while (classes_[static_cast<size_t>(label)].merged_into != label) {
      auto& next = classes_[static_cast<size_t>(label)].merged_into;
      next = classes_[static_cast<size_t>(next)].merged_into; // halve the path
      label = next;
    }
    return label;
  }

  Class& class_of(int64_t label) {
    return classes_[static_cast<size_t>(find_class(label))];
  }

  // Merges classes into the one that most storages have joined, of several the oldest.
  void merge(Ids labels) {
    sort_and_deduplicate(labels);
    const auto joined = [this](int64_t label) { return classes_[static_cast<size_t>(label)].joined; };
    std::stable_sort(labels.begin(), labels.end(), [&](int64_t one, int64_t other) { return joined(one) > joined(other); });
    auto& into = classes_[static_cast<size_t>(labels.front())];
    for (size_t i = 1; i < labels.size(); ++i) {
      auto& merged = classes_[static_cast<size_t>(labels[i])];
      merged.merged_into = labels.front();
      into.members += merged.members;
      into.joined += merged.members;
      into.cost_s += merged.cost_s;
    }
  }

  void note_related(int64_t parent, int64_t child) {
    if (!has_classes()) {
      mark_changed(parent);
      return mark_changed(child);
    }
    Ids labels;
    for (auto id : {parent, child}) {
      if (at(id).label != kNone) {
        labels.push_back(find_class(at(id).label));
      }
    }
    merge(labels);
  }

  void note_dearer(int64_t id, double seconds) {
    if (has_classes()) {
      class_of(at(id).label).cost_s += seconds;
    } else {
      mark_changed(id);
    }
  }

  // Neighbourhoods that are regions: storages that are reachable through evicted ones.

  bool is_region() const {
    return rule_ == Rule::kFull || rule_ == Rule::kUpwards;
  }

  double cost_behind_s(int64_t id, Cached& cached, Ids Storage::*onward) {
    if (cached.outdated) {
      double cost_s = 0;
      each_reachable(id, onward, [&](Storage& found) { cost_s += found.gone ? found.own_s : 0; });
      cached = {cost_s, false};
    }
    return cached.cost_s;
  }

  // Marks the costs that include a storage, and its own, as out of date.
  void mark_changed(int64_t id) {
    if (!is_region()) {
      return;
    }
    at(id).upwards.outdated = at(id).downwards.outdated = true;
    each_reachable(id, &Storage::children, [](Storage& found) { found.upwards.outdated = true; });
    if (rule_ == Rule::kFull) {
      each_reachable(id, &Storage::parents, [](Storage& found) { found.downwards.outdated = true; });
    }
  }

  // Visits the storages that one reaches through evicted ones, in the order in which planner.solvers.online.heuristics adds up
  // their costs.
  template <typename Visit>
  void each_reachable(int64_t from, Ids Storage::*onward, Visit visit) {
    const auto search = ++searches_;
    at(from).seen = search;
    stack_.assign(1, from);
    while (!stack_.empty()) {
      const auto& next = at(stack_.back()).*onward;
      stack_.pop_back();
      for (auto id : next) {
        auto& storage = at(id);
        if (storage.seen == search) {
          continue;
        }
        storage.seen = search;
        if (storage.gone) {
          stack_.push_back(id);
        }
        visit(storage);
      }
    }
  }

  const py::object heuristic_;
  const Rule rule_;
  const int64_t least_bytes_; // storages up to this size are never evicted
  const bool counts_bytes_; // the time of an op is estimated by the bytes that it reads and writes
  std::vector<Storage> storages_; // by id
  Ids unused_; // ids of dropped storages
  std::unordered_map<int64_t, Op> ops_; // with an output that is not dropped
  std::vector<Class> classes_;
  Ids candidates_, around_, stack_;
  int64_t numbers_ = 0, op_numbers_ = 0, searches_ = 0;
  double now_ = 0; // when a storage fired last
};

py::object ledger_type() {
  static py::object* type = new py::object(
      py::class_<Ledger>(py::handle(), "Ledger", py::module_local())
          .def(py::init<const std::string&, py::object>())
          .def("__len__", &Ledger::length)
          .def_property_readonly("heuristic", &Ledger::heuristic)
          .def("add_storage", &Ledger::add_storage, py::arg("size_bytes"), py::arg("origin") = py::none())
          .def("add_op", &Ledger::add_op)
          .def("note_recomputed", &Ledger::note_recomputed)
          .def("touch", &Ledger::touch)
          .def("note_evicted", &Ledger::note_evicted)
          .def("note_computed", &Ledger::note_computed)
          .def("pin", &Ledger::pin)
          .def("unpin", &Ledger::unpin)
          .def("drop", &Ledger::drop)
          .def("choose_victim", &Ledger::choose_victim));
  return *type;
}

} // namespace

EvictionLedger* find_ledger(PyObject* object) {
  static const auto* type = reinterpret_cast<PyTypeObject*>(ledger_type().ptr());
  return Py_TYPE(object) == type ? py::handle(object).cast<Ledger*>() : nullptr;
}

extern "C" {

// Return the type of ledgers, which are made of the name of a heuristic and the heuristic itself.
PyObject* ledger_type_of_library() {
  HANDLE_TH_ERRORS
  return ledger_type().release().ptr();
  END_HANDLE_TH_ERRORS
}

} // extern "C"
