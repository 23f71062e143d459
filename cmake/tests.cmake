# The library of the C++ tests, and a function that adds the tests of a folder.

enable_testing()
find_path(DOCTEST_INCLUDE doctest/doctest.h HINTS ENV DOCTEST_INCLUDE)
if(NOT DOCTEST_INCLUDE)
  message(FATAL_ERROR "TM_BUILD_TESTS=ON needs doctest/doctest.h. Install doctest-dev, set the "
                      "environment variable DOCTEST_INCLUDE to its folder, or build with "
                      "-DTM_BUILD_TESTS=OFF.")
endif()
add_library(tm_doctest_main STATIC tests/cpp/doctest_main.cc)
target_include_directories(tm_doctest_main PUBLIC ${DOCTEST_INCLUDE} tests/cpp)
if(TM_SANITIZE)
  target_compile_options(tm_doctest_main PRIVATE -fno-sanitize=all)  # not our code, and slow to
                                                                     # compile
endif()

# Adds every <name>_test.cc of `folder` as the test <group>/<name>_test. It links the other arguments.
function(tm_tests group folder)
  file(GLOB tests CONFIGURE_DEPENDS ${folder}/*_test.cc)
  foreach(test ${tests})
    get_filename_component(name ${test} NAME_WE)
    add_executable(${name} ${test})
    target_link_libraries(${name} PRIVATE ${ARGN} tm_doctest_main)
    target_compile_options(${name} PRIVATE -O1 ${tm_no_pointer_checks})
    add_test(NAME ${group}/${name} COMMAND ${name})
  endforeach()
endfunction()
