#include "plans/plan_file.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unordered_set>

namespace fused::plans {
namespace {

constexpr std::string_view first_line = "torch_fused_linear plans 5\n";

uint64_t checksum(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

std::string last_line(const std::string& body) {
  std::ostringstream line;
  line.imbue(std::locale::classic());  // no thousands separators, whatever the program's locale
  line << "checksum " << std::hex << checksum(body) << '\n';
  return line.str();
}

// The fields, separated by tabs: the machine, the version that wrote the line, the decision.
PlanLine parse(const std::string& text) {
  std::istringstream fields(text);
  PlanLine line;
  std::string library;
  auto& [made_for, version, decision] = line;
  for (auto* field : {&made_for.gpu, &library, &made_for.driver, &version}) {
    std::getline(fields, *field, '\t');
  }
  std::getline(fields, decision);
  made_for.library_version = std::strtoull(library.c_str(), nullptr, 10);
  return line;
}

std::string to_text(const PlanLine& line) {
  const auto& [gpu, library, driver] = line.made_for;
  return gpu + '\t' + std::to_string(library) + '\t' + driver + '\t' + line.version + '\t' +
         line.decision + '\n';
}

// The configurations of our own kernels may mean something else in another version.
std::optional<std::pair<PassProblem, Decision>> understood(const PlanLine& line) {
  auto entry = from_text(line.decision);
  const bool own = entry && entry->second.strategy->provider == gemm::Provider::own;
  return own && line.version != own_version ? std::nullopt : entry;
}

class FileLock {
 public:
  explicit FileLock(const std::string& path)
      : descriptor_(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666)) {
    TORCH_CHECK(descriptor_ >= 0, "plans: cannot open ", path, ": ", std::strerror(errno));
    int status = 0;
    while ((status = flock(descriptor_, LOCK_EX)) != 0 && errno == EINTR) {
    }
    const int error = errno;
    if (status != 0) close(descriptor_);  // a constructor that throws runs no destructor
    TORCH_CHECK(status == 0, "plans: cannot lock ", path, ": ", std::strerror(error));
  }
  ~FileLock() { close(descriptor_); }
  FileLock& operator=(FileLock&&) = delete;

 private:
  int descriptor_;
};

void write_durably(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "we");
  TORCH_CHECK(file != nullptr, "plans: cannot write ", path, ": ", std::strerror(errno));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size() &&
                       std::fflush(file) == 0 && fsync(fileno(file)) == 0;
  const int error = errno;
  std::fclose(file);
  TORCH_CHECK(written, "plans: cannot write ", path, ": ", std::strerror(error));
}

}  // namespace

std::vector<PlanLine> read_plan_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(first_line.size(), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));  // fails if it is a folder
  TORCH_CHECK_VALUE(file.is_open() && !file.bad(), "plans: cannot read ", path, ": ",
                    std::strerror(errno));
  constexpr auto refused = "; nothing of it is used";
  TORCH_CHECK_VALUE(text == first_line, "plans: ", path,
                    " is no file of plans that this version reads (expected '",
                    first_line.substr(0, first_line.size() - 1), "')", refused);
  text.append(std::istreambuf_iterator<char>(file), {});  // a device may have no end
  const auto end = std::min(text.rfind("checksum "), text.size());
  TORCH_CHECK_VALUE(text.substr(end) == last_line(text.substr(0, end)), "plans: ", path,
                    " is damaged (its checksum does not fit)", refused);

  std::vector<PlanLine> lines;
  std::istringstream body(text.substr(first_line.size(), end - first_line.size()));
  for (std::string line; std::getline(body, line);) lines.push_back(parse(line));
  return lines;
}

Entries entries_for(const std::vector<PlanLine>& file, const MadeFor& here) {
  Entries entries;
  for (const auto& line : file) {
    if (line.made_for != here) continue;
    if (auto entry = understood(line)) entries.push_back(std::move(*entry));
  }
  return entries;
}

std::string mismatch(const std::vector<PlanLine>& file, const MadeFor& here) {
  if (file.empty()) return "";  // a process that measured nothing wrote it
  if (std::ranges::find(file, here, &PlanLine::made_for) != file.end()) return "";
  const auto& [gpu, library, driver] = file.back().made_for;
  if (gpu != here.gpu) return "made for " + gpu + ", this is " + here.gpu;
  if (library != here.library_version) {
    return "made with cuBLASLt " + std::to_string(library) + ", this is " +
           std::to_string(here.library_version);
  }
  return "made with driver " + driver + ", this is " + here.driver;
}

void write_plan_file(const std::string& path, const MadeFor& here, const Entries& entries,
                     bool merge) {
  const FileLock lock(path + ".lock");
  std::vector<PlanLine> file;
  try {
    if (std::filesystem::exists(path)) file = read_plan_file(path);
  } catch (const c10::ValueError&) {
    if (merge) throw;
  }
  std::unordered_set<PassProblem, gemm::PassProblemHash> ours;
  for (const auto& [problem, decision] : entries) ours.insert(problem);
  std::erase_if(file, [&](const PlanLine& line) {
    if (line.made_for != here) return false;
    const auto entry = understood(line);
    return entry && (!merge || ours.contains(entry->first));
  });
  for (const auto& [problem, decision] : entries) {
    file.push_back({here, own_version, to_text(problem, decision)});
  }
  std::string text(first_line);
  for (const auto& line : file) text += to_text(line);
  const auto beside = path + ".tmp";
  write_durably(beside, text + last_line(text));
  TORCH_CHECK(std::rename(beside.c_str(), path.c_str()) == 0, "plans: cannot write ", path, ": ",
              std::strerror(errno));
}

}  // namespace fused::plans
