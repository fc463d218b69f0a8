// Records of ops near the budget of the eager runtime: op_records.cpp describes them.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <vector>

// What the records of an op depend on, but for its tensors.
using Key = std::vector<int64_t>;

// A call of an operator.
struct CalledOp {
  const Key& key;
  c10::ArrayRef<at::Tensor> inputs; // those whose memory counts, in order
  int64_t module; // the number of the module that is running
  c10::function_ref<bool()> execute; // without the interpreter lock; returns false if it failed
  c10::function_ref<c10::ArrayRef<c10::IValue>()> outputs; // when it has run
  c10::function_ref<int64_t(const c10::StorageImpl&)> bytes_of; // that the budget counts
};

// How far an op has come.
enum class Recorded {
  kDone, // it was executed, and recorded if it was to be
  kFailed, // it is part of a recomputation, and failed
  kNotKnown, // nothing was done: the recorder executes it, and its key may be learned
  kLeft, // it was not executed, or it failed: the recorder goes on
};

// The functions need Python's interpreter lock unless they say something else.
class OpRecords {
 public:
  virtual ~OpRecords() = default;

  // Executes an op and records it. Called without the interpreter lock.
  virtual Recorded record(const CalledOp& called) = 0;

  // Takes the record of an op, without its tensors, as the pattern for further ones of the same key.
  virtual void learn(const Key& key, PyObject* pattern) = 0;
};

// `parts`: the recorder, and the classes of storages, their weak references, references and logged ops.
std::unique_ptr<OpRecords> new_op_records(PyObject* parts);
