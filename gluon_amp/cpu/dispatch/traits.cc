#include "dispatch/traits.h"

#include <dmlc/logging.h>

#include <map>
#include <sstream>

#include "dispatch/attributes.h"

namespace gluon_amp {
namespace {

const std::map<std::string, Trait> kColumns{
    {"runs_in_mxnet", kRunsInMXNet},     {"moves", kMoves},                 {"leaves_outputs", kLeavesOutputs},
    {"refuses_float16", kRefusesFloat16}, {"pushes_weight", kPushesWeight},  {"has_parameters", kHasParameters},
    {"forgets_bias", kForgetsBias},      {"casts", kCasts},                 {"leaves_input", kLeavesInput},
    {"refuses_empty", kRefusesEmpty},    {"user_code", kUserCode}};

struct Row {
  unsigned traits = 0;
  std::vector<size_t> moving_averages;
};

std::map<std::string, Row>& rows() {
  static auto* rows = new std::map<std::string, Row>;
  return *rows;
}

const Row& row_of(const std::string& name) {
  static const Row none;
  const auto place = rows().find(name);
  return place == rows().end() ? none : place->second;
}

}  // namespace

void read_columns(const char* text) {
  rows().clear();
  std::istringstream lines(text);
  for (std::string header, operators; std::getline(lines, header) && std::getline(lines, operators);) {
    std::istringstream words(header), names(operators);
    std::string column;
    words >> column;
    std::vector<size_t> indices;
    for (size_t index; words >> index;) indices.push_back(index);
    for (std::string name; names >> name;) {
      if (column == "constants") add_constant(name);
      else if (column == "moving_averages") rows()[name].moving_averages = indices;
      else if (kColumns.count(column)) rows()[name].traits |= kColumns.at(column);
      else throw dmlc::Error("the engine has no column " + column);
    }
  }
}

unsigned traits_of(const std::string& name) { return row_of(name).traits; }

std::vector<size_t> moving_averages_of(const std::string& name) { return row_of(name).moving_averages; }

}  // namespace gluon_amp
