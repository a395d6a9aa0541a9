#include "dispatch/traits.h"

#include <dmlc/logging.h>

#include <iterator>
#include <map>
#include <sstream>

#include "dispatch/attributes.h"

namespace gluon_amp {
namespace {

const std::map<std::string, Trait> kColumns{
    {"runs_in_mxnet", kRunsInMXNet},      {"moves", kMoves},                {"widens", kWidens},
    {"refuses_float16", kRefusesFloat16}, {"pushes_weight", kPushesWeight}, {"has_parameters", kHasParameters},
    {"forgets_bias", kForgetsBias},       {"casts", kCasts},                {"leaves_input", kLeavesInput},
    {"leaves_outputs", kLeavesOutputs},   {"user_code", kUserCode},         {"checks_indices", kChecksIndices},
    {"refuses_empty", kRefusesEmpty},     {"refuses_empty_for_integers", kRefusesEmptyForIntegers}};

std::map<std::string, OperatorRow>& rows() {
  static auto* rows = new std::map<std::string, OperatorRow>;
  return *rows;
}

void add(const std::string& column, const std::vector<std::string>& words, OperatorRow* row) {
  if (column == "moving_averages")
    for (const std::string& word : words) row->moving_averages.push_back(std::stoul(word));
  else if (column == "refuses_empty" && !words.empty()) row->refuses_empty_with = words;
  else if (kColumns.count(column)) row->traits |= kColumns.at(column);
  else throw dmlc::Error("the engine has no column " + column);
}

}  // namespace

void read_columns(const char* text) {
  rows().clear();
  std::istringstream lines(text);
  for (std::string header, operators; std::getline(lines, header) && std::getline(lines, operators);) {
    std::istringstream words(header), names(operators);
    std::string column;
    words >> column;
    const std::vector<std::string> others{std::istream_iterator<std::string>(words), {}};
    for (std::string name; names >> name;) {
      if (column == "constants") add_constant(name);
      else add(column, others, &rows()[name]);
    }
  }
}

const OperatorRow& row_of(const std::string& name) {
  static const OperatorRow none;
  const auto place = rows().find(name);
  return place == rows().end() ? none : place->second;
}

}  // namespace gluon_amp
