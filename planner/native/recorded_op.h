// A record of an op with the attributes of planner.train.eager.storages.RecordedOp, of which the lists are made when Python reads
// them. Records were copies of such objects: a list, a named tuple for each input, weak references and numbers, a quarter of the time
// that recording took.

#pragma once

#include "python_objects.h"

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <utility>

// A tensor that an op has read, without what all ops of its signature share.
struct [[gnu::visibility("hidden")]] Read {
  pybind11::object storage; // None if the op writes it in place
  int64_t version, offset;
  bool conjugated, negated;
};

// What is not the pattern's. No `Read` is changed when Python may have seen it.
struct [[gnu::visibility("hidden")]] OpFields {
  pybind11::object pattern; // the `OpPattern` of the signature
  pybind11::object known, draws, module, seconds, ledger_id;
  pybind11::object references; // the list of inputs, once Python has asked for it
  c10::SmallVector<Read, 3> reads;
  c10::SmallVector<c10::Storage, 2> kept;
  c10::SmallVector<std::pair<int64_t, pybind11::object>, 1> made; // positions of outputs, and weak references to their storages
  int64_t number, room_bytes;
  bool recordable, in_place;
};

// Returns a new record, with the fields of another one, or with those of a pattern that has no storages.
pybind11::object copy_recorded_op(const OpFields& fields);

OpFields& fields_of_op(pybind11::handle record);
