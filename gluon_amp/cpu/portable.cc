// Lets a wheel that a compiler of today makes run where glibc and libstdc++ are of 2018: Ubuntu 18.04,
// Debian 10, RHEL 8. The headers of newer ones call three things that are not there; the library
// has them itself, and hands them to nobody (setup.py's list of exports). `make wheel` fails where
// a compiler asks for more.
#include <new>
#include <sstream>

#ifndef __GLIBCXX__
#error "gluon_amp's engine shares strings, maps and functions with MXNet: compile it with GCC's libstdc++"
#endif

#if __has_include(<sys/single_threaded.h>)
#include <sys/single_threaded.h>
// glibc 2.32's: whether the process has one thread. "No" costs atomic counts, and is always right.
char __libc_single_threaded = 0;
#endif

namespace std {
void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // of GCC 11's libstdc++
}  // namespace std

// std::ostringstream's constructor without arguments, of GCC 9's libstdc++: the one that takes a
// mode, which all have, does the same.
extern "C" void _ZNSt19basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* place) {
  new (place) std::ostringstream(std::ios_base::out);
}
